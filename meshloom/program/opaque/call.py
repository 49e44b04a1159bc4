"""A call of an opaque module as a value: what is passed, what comes back, and what it costs.

It is an operand of the operator (`operator.py`) as text, so that a program with opaque parts travels as others do. It
holds no path: equal calls of equal modules are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, treespec_loads

from meshloom.core.errors import CaptureError, TrainingError
from meshloom.core.modules.named_leaves import function_name, is_function, shown
from meshloom.core.moments.leaf import leaf_functions
from meshloom.program.ir.encoding import (
    decoded,
    decoded_meta,
    encoded,
    encoded_meta,
    encoded_structure,
)
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.nodes import Meta

METHODS = ("__call__", "forward")
FUNCTION = "function"  # the method of a leaf function's call


@dataclass(frozen=True, kw_only=True)
class OpaqueCost:
    """What a call took when it ran once: FLOPs and bytes as in `Cost`. saved_bytes: kept for its backward, besides
    its inputs and its module's tensors. saved_inputs: the inputs that are kept."""

    flops: int = 0
    backward_flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    backward_read_bytes: int = 0
    backward_written_bytes: int = 0
    saved_bytes: int = 0
    saved_inputs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpaqueCall:
    """One call.

    method: `__call__`, with the module's hooks, `forward`, or FUNCTION.
    closed_over: the values that a function closes over, encoded, by name.
    spec: structure of (args, kwargs), as text. leaves: the plain arguments among their leaves, encoded; None where
        a tensor is, in a list of its own: `[]`.
    state: names of the module's parameters and buffers, below it, in the order of the operator's operands; tied ones
        together.
    modes: whether each of its modules trains, in the order of `modules()`.
    written: indices in `state` of the buffers that it writes. trained_writes: of the trained parameters.
    results: its new tensors. places: where each lies among the leaves of what it returns. num_leaves: of these.
    attributes: (module below it, attribute) where it leaves further results.
    number: of the call among those of its module. num_draws: its random ATen calls. draws_alike: whether these were as many for each batch.
    needed: indices of the results that the program uses; None: not known yet. is_last_to_draw: whether nothing after it
        draws, so that it may draw as often as its values say.
    """

    method: str
    spec: str
    leaves: tuple[Any, ...]
    state: tuple[tuple[str, ...], ...]
    modes: tuple[bool, ...]
    written: tuple[int, ...]
    results: tuple[Meta, ...]
    places: tuple[int, ...]
    num_leaves: int
    attributes: tuple[tuple[str, str], ...]
    num_draws: int
    cost: OpaqueCost
    number: int = 0
    draws_alike: bool = True
    needed: tuple[int, ...] | None = None
    is_last_to_draw: bool = False
    trained_writes: tuple[int, ...] = ()
    returned: str = ""
    closed_over: tuple[tuple[str, Any], ...] = ()

    def text(self) -> str:
        """The call as text, equal for equal calls."""
        return json.dumps(
            {
                **vars(self),
                "results": [encoded_meta(each) for each in self.results],
                "cost": vars(self.cost),
            }
        )

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(text: str) -> OpaqueCall:
        """The call of this text."""
        found = json.loads(text)
        cost = found.pop("cost")
        return OpaqueCall(
            **{
                name: _tuples(value)
                for name, value in found.items()
                if name not in ("results", "leaves", "closed_over")
            },
            closed_over=tuple((name, value) for name, value in found["closed_over"]),
            leaves=tuple(found["leaves"]),
            results=tuple(map(decoded_meta, found["results"])),
            cost=OpaqueCost(**{name: _tuples(value) for name, value in cost.items()}),
        )

    def arguments(
        self, inputs: Sequence[Tensor], modules: Sequence[nn.Module] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors, and these modules of a function."""
        tensors = iter(inputs)

        def argument(leaf: Any) -> Any:
            if leaf is None:
                return next(tensors)
            is_module = isinstance(leaf[0], dict) and _MODULE in leaf[0]
            return modules[leaf[0][_MODULE]] if is_module else decoded(leaf[0])

        args, kwargs = _spec(self.spec).unflatten([argument(each) for each in self.leaves])
        return tuple(args), dict(kwargs)


class ChangedCallError(TrainingError):
    """A call of an opaque module that is not like the recorded one."""


class OpaqueError(CaptureError):
    """A leaf that cannot be one operator."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{place_of(path)} cannot be one operator: {why}. {instead_of(path)}{WAY_OUT}")


class UnrecordedLeafError(BaseException):
    """A leaf function is called in an export, and its calls were not recorded. No error: whoever exports records them."""


def place_of(path: str) -> str:
    """A leaf and the line of its function, for a sentence."""
    functions = leaf_functions(function_name(path)) if is_function(path) else []
    return functions[0].place if functions else shown(path)


def instead_of(path: str) -> str:
    """What to write in place of a leaf that cannot be one, if anything."""
    if is_function(path):
        return "Or mark the function around it with @ml.leaf. "
    return "Name the module around it in Job(leaves=[...]). " if path else ""


def split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], modules: Iterable[nn.Module] = ()
) -> tuple[str, tuple[Any, ...], list[Tensor]]:
    """The structure of arguments, their plain leaves and their tensors. modules: those that may be among them. Raises `CaptureError` for other
    objects."""
    numbers = {id(vars(each)): number for number, each in enumerate(modules)}
    leaves, spec = tree_flatten((args, kwargs))
    plain = tuple(
        None
        if isinstance(each, Tensor)
        else [{_MODULE: numbers[id(vars(each))]}]
        if isinstance(each, nn.Module) and id(vars(each)) in numbers
        else [encoded(each)]
        for each in leaves
    )
    text = encoded_structure(spec)
    if text is None:
        held = tree_leaves((args, kwargs), is_leaf=lambda each: type(each) not in (tuple, list, dict))
        kinds = dict.fromkeys(type(each).__name__ for each in held if not tree_structure(each).is_leaf())
        raise CaptureError(
            f"its arguments hold {', '.join(kinds) or 'a dict whose keys are no texts'}, which no program hands on"
        )
    return text, plain, [each for each in leaves if isinstance(each, Tensor)]


def plain_text_of(leaves: Sequence[Any]) -> str:
    """The plain values among what a call returns, which a program fixes; equal texts for equal values."""
    return json.dumps([None if isinstance(each, Tensor) else [encoded(each)] for each in leaves])


_MODULE = "module"


def state_of(module: nn.Module) -> tuple[tuple[tuple[str, ...], ...], list[Tensor]]:
    """Names and tensors of a module's parameters and buffers; tied ones once, with all of their names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
            tensors.setdefault(id(tensor), tensor)
    return tuple(map(tuple, names.values())), list(tensors.values())


def meta_of(tensor: Tensor) -> Meta:
    """A dense tensor's layout. Raises `CaptureError` for others."""
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        raise CaptureError(f"it returns a {type(tensor).__name__} of layout {tensor.layout}")
    return Meta(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        stride=tuple(tensor.stride()),
        requires_grad=tensor.requires_grad,
    )


@lru_cache(maxsize=1024)
def _spec(text: str) -> TreeSpec:
    return treespec_loads(text)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
