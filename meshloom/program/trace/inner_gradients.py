"""Records where a loss takes gradients itself, which `torch.export` loses without an error or a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch import eager_transforms, vmap

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAY_OUT, SourcePlace, place_here
from meshloom.program.trace.export_patches import replaced

_torch: Any = torch  # for private names
_TRANSFORM = "uses a transform of torch.func (grad, jacrev, jvp, vmap, ...)"
_ENTERED = (
    (_torch.autograd, "_engine_run_backward"),
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
    (vmap, "vmap_increment_nesting"),
)


@dataclass
class InnerGradients:
    """backward: where autograd ran (`grad`, `backward`); transforms: where one of `torch.func` began."""

    backward: list[SourcePlace] = field(default_factory=list[SourcePlace])
    transforms: list[SourcePlace] = field(default_factory=list[SourcePlace])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records calls inside."""
        with ExitStack() as around:
            for module, name in _ENTERED:
                places = self.backward if module is _torch.autograd else self.transforms
                recording = _recording(getattr(module, name), places)
                around.enter_context(replaced(module, name, recording))
            yield

    def check(self, graph: fx.Graph | None = None) -> None:
        """Raise `CaptureError` if a gradient was taken, even if unused, or the graph has transform steps."""
        if self.backward:
            raise _refused(self.backward[0], "takes a gradient itself (torch.autograd.grad or backward)")
        nodes = graph.nodes if graph is not None and self.transforms else ()
        if any("_functorch" in (getattr(node.target, "__module__", None) or "") for node in nodes):
            raise _refused(self.transforms[0], _TRANSFORM)

    def refuse_transforms(self, error: Exception) -> None:
        """Raise `CaptureError` if `error` comes from `torch.func`."""
        trace, inside = error.__traceback__, False
        while trace:
            inside |= "_functorch" in trace.tb_frame.f_code.co_filename
            trace = trace.tb_next
        if self.transforms and (inside or "functorch" in str(error) or "vmap" in str(error)):
            raise _refused(self.transforms[0], _TRANSFORM) from error


@contextmanager
def transforms_ended() -> Iterator[None]:
    """Ends transforms that an error interrupted, which later transforms would take for outer ones."""
    functorch = _torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _recording(function: Any, places: list[SourcePlace]) -> Any:
    def recording(*args: Any, **kwargs: Any) -> Any:
        # otherwise it is a part of a transform that is already recorded
        if not _torch._C._functorch.get_dynamic_layer_stack_depth():
            places.append(place_here(2))
        return function(*args, **kwargs)

    return recording


def _refused(place: SourcePlace, what: str) -> CaptureError:
    return CaptureError(f"The loss {what} at {place}, which a program cannot represent. {WAY_OUT}")
