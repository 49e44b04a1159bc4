"""A call of an opaque module as a value: what is passed, what comes back, and what it costs.

It is an operand of the operator (`operator.py`) as text, so that a program with opaque parts travels as others do. It
holds no path: equal calls of equal modules are equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, treespec_loads

from meshloom.core.errors import CaptureError, TrainingError
from meshloom.program.ir.encoding import (
    decoded,
    decoded_meta,
    encoded,
    encoded_meta,
    encoded_structure,
)
from meshloom.program.ir.leaves import ArrayStandIn, is_array
from meshloom.program.ir.nodes import Meta

METHODS = ("__call__", "forward")


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

    method: `__call__`, with the module's hooks, or `forward`.
    spec: structure of (args, kwargs), as text. leaves: the plain arguments among their leaves, encoded; None where
        a tensor is, in a list of its own: `[]`.
    state: names of the module's parameters and buffers, below it, in the order of the operator's operands; tied ones
        together.
    modes: whether each of its modules trains, in the order of `modules()`.
    written: indices in `state` of the buffers that it writes. settled: of the trained parameters that it gives the same
        values in every call.
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
    settled: tuple[int, ...] = ()
    returned: str = ""

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
            **{name: _tuples(value) for name, value in found.items() if name not in ("results", "leaves")},
            leaves=tuple(found["leaves"]),
            results=tuple(map(decoded_meta, found["results"])),
            cost=OpaqueCost(**{name: _tuples(value) for name, value in cost.items()}),
        )

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors."""
        tensors = iter(inputs)
        leaves = [
            next(tensors)
            if each is None
            else _array(next(tensors))
            if each[0] == _ARRAY
            else decoded(each[0])
            for each in self.leaves
        ]
        args, kwargs = _spec(self.spec).unflatten(leaves)
        return tuple(args), dict(kwargs)


class ChangedCallError(TrainingError):
    """A call of an opaque module that is not like the recorded one."""


def split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], list[Tensor]]:
    """The structure of arguments, their plain leaves and their tensors. Raises `CaptureError` for other objects."""
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [_Array(each.tensor) if isinstance(each, ArrayStandIn) else each for each in leaves]
    leaves = [_Array(torch.from_numpy(each)) if is_array(each) else each for each in leaves]
    plain = tuple(
        None if isinstance(each, Tensor) else [_ARRAY if isinstance(each, _Array) else encoded(each)]
        for each in leaves
    )
    text = encoded_structure(spec)
    if text is None:
        raise CaptureError(
            f"its arguments are {' '.join(str(spec).split())[:160]}, which have no name on another rank"
        )
    tensors = (each.tensor if isinstance(each, _Array) else each for each in leaves)
    return text, plain, [each for each in tensors if isinstance(each, Tensor)]


def plain_text_of(leaves: Sequence[Any]) -> str:
    """The plain values among what a call returns, which a program fixes; equal texts for equal values."""
    return json.dumps([None if isinstance(each, Tensor) else [encoded(each)] for each in leaves])


class _Array(NamedTuple):
    tensor: Tensor


_ARRAY = {"array": True}


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


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
