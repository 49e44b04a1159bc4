"""Where a loss takes gradients itself, noted while it is read: `torch.export` loses them, and says so without
a line or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch import eager_transforms, vmap

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAY_OUT, SourcePlace, place_here

_torch: Any = torch  # for what torch keeps to itself
_TRANSFORM = "uses a transform of torch.func (grad, jacrev, jvp, vmap, ...)"
_BEGIN = (
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
    (vmap, "vmap_increment_nesting"),
)
_ENTERED = ((_torch.autograd, "_engine_run_backward"), *_BEGIN)


@dataclass
class InnerGradients:
    """What was noted. backward: where autograd ran (`torch.autograd.grad`, `backward`); transforms: where one
    of `torch.func` began."""

    backward: list[SourcePlace] = field(default_factory=list[SourcePlace])
    transforms: list[SourcePlace] = field(default_factory=list[SourcePlace])

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around the loss."""
        before = [(module, name, getattr(module, name)) for module, name in _ENTERED]
        for module, name, function in before:
            setattr(
                module,
                name,
                _noting(function, self.backward if module is _torch.autograd else self.transforms),
            )
        try:
            yield
        finally:
            for module, name, function in before:
                setattr(module, name, function)

    def check(self, graph: fx.Graph | None = None) -> None:
        """Raises `CaptureError` where a gradient was taken, whatever became of it, or if there are the steps
        of a transform in the graph."""
        if self.backward:
            raise _refused(self.backward[0], "takes a gradient itself (torch.autograd.grad or backward)")
        nodes = graph.nodes if graph is not None and self.transforms else ()
        if any("_functorch" in (getattr(node.target, "__module__", None) or "") for node in nodes):
            raise _refused(self.transforms[0], _TRANSFORM)

    def refuse_transforms(self, error: Exception) -> None:
        """Raises `CaptureError` if it is one of `torch.func` that `error` came of."""
        trace, inside = error.__traceback__, False
        while trace:
            inside |= "_functorch" in trace.tb_frame.f_code.co_filename
            trace = trace.tb_next
        if self.transforms and (inside or "functorch" in str(error) or "vmap" in str(error)):
            raise _refused(self.transforms[0], _TRANSFORM) from error


@contextmanager
def transforms_ended() -> Iterator[None]:
    """Transforms that an error left half-way are over afterwards; later ones, of whatever code, would take
    themselves for a part of them."""
    functorch = _torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _noting(function: Any, places: list[SourcePlace]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        # else it is a part of the transform that was noted
        if not _torch._C._functorch.get_dynamic_layer_stack_depth():
            places.append(place_here(2))
        return function(*args, **kwargs)

    return noting


def _refused(place: SourcePlace, what: str) -> CaptureError:
    return CaptureError(f"The loss {what} at {place}, and a program cannot hold that. {WAY_OUT}")
