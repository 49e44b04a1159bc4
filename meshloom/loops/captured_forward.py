"""A module's forward as the loss of a job: what decides which program a call needs, and its results in the shape that it gave them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_map, tree_unflatten

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.program.trace.export_patches import without_cache

_PLAIN = (str, bool, int, float, type(None))
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class CapturedForward:
    """Calls that are equal here, and whose inputs are alike, run one program: equal ones are one loss of a job.

    training: of each module. trained: of each parameter. graded: inputs that require gradients; None: nothing does. autocast: kind of device
    and dtype of the regions around the call. positional: inputs that are given by position. changes: how often what the forward
    reads besides tensors has changed. loss: of the module and a batch, in place of the module's own call. method: that is called.
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    graded: tuple[str, ...] | None
    autocast: tuple[tuple[str, torch.dtype], ...]
    positional: tuple[str, ...]
    changes: int
    loss: LossFunction | None = None
    method: str = "forward"

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """What a program of `model` returns; batch: the inputs by name, or that of the loss."""
        with ExitStack() as around:
            around.enter_context(torch.set_grad_enabled(self.graded is not None))
            around.enter_context(without_cache(model))
            for device, dtype in self.autocast:
                around.enter_context(torch.autocast(device, dtype))
            returned = self._called(model, batch) if self.loss is None else self.loss(model, batch)
        return tree_map(_kept, returned)

    def _called(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        args, named = self.arguments(batch)
        return (model if self.method == "forward" else getattr(model, self.method))(*args, **named)

    def arguments(self, batch: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs as a call gets them. batch: by name."""
        named = {name: value for name, value in batch.items() if name not in self.positional}
        return [batch[name] for name in self.positional], named

    def alone(self) -> ExitStack:
        """A context for captures: in none of the regions around the call but those that it enters itself, with gradients."""
        around = ExitStack()
        around.enter_context(torch.enable_grad())
        for device, _ in self.autocast:
            around.enter_context(torch.autocast(device, enabled=False))
        return around


def autocast_here() -> tuple[tuple[str, torch.dtype], ...]:
    """The regions around the caller, as of `CapturedForward`."""
    return tuple(
        (each, torch.get_autocast_dtype(each)) for each in _DEVICES if torch.is_autocast_enabled(each)
    )


def named_inputs(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the inputs that are given by position, and all of them by name.

    >>> named_inputs(lambda x, *more, mask=None: x, (1, 2), {"mask": 3})
    (('x', '1'), {'x': 1, '1': 2, 'mask': 3})
    """
    known = inspect.signature(forward).parameters.values()
    by_position = [
        each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    names = (*by_position[: len(args)], *map(str, range(len(by_position), len(args))))
    return names, {**dict(zip(names, args, strict=True)), **kwargs}


def results(values: Sequence[Any], structure: TreeSpec) -> Any:
    """What the forward returns. values, structure: of what its program does."""
    returned = tree_unflatten(values, structure)
    return tree_map(lambda each: each.value if _is_constant(each) else each, returned, is_leaf=_is_constant)


class _Constant:
    """A result that is no tensor, as a part of the structure of results."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_constant(value: Any) -> bool:
    return isinstance(value, _Constant)


register_pytree_node(
    _Constant, lambda constant: ([], constant.value), lambda _, value: _Constant(value),
    serialized_type_name="meshloom.loops.constant", to_dumpable_context=lambda value: value, from_dumpable_context=lambda value: value,
)  # fmt: skip


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor | torch.SymInt | torch.SymFloat):
        return value
    if isinstance(value, _PLAIN):
        return _Constant(value)
    raise CaptureError(
        f"The forward returns a {type(value).__name__}, and one that is divided returns tensors, numbers, texts, and tuples, lists and dicts of them. Register the "
        "class with torch.utils._pytree.register_dataclass, or use a plan with dp and zero alone, which runs the module as it is."
    )
