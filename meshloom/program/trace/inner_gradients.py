"""Notices where a loss takes gradients itself, and refuses hooks on them and on what autograd saves for them: `torch.export` loses
all of these without an error or a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._functorch import eager_transforms, vmap
from torch.utils.hooks import BackwardHook

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAY_OUT, WAYS_OUT, SourcePlace, place_here, place_of_error
from meshloom.program.ir.replaced import replaced

_torch: Any = torch  # for private names
_TRANSFORMS = tuple(each.__file__ for each in (eager_transforms, vmap))


class InnerGradientError(CaptureError):
    """A loss takes gradients itself: it must be traced with them (`program/gradients/gradient_trace.py`)."""


@dataclass
class InnerGradients:
    """backward: where autograd ran (`grad`, `backward`)."""

    backward: list[SourcePlace] = field(default_factory=list[SourcePlace])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Ends what is inside with the first gradient."""
        run = _torch.autograd._engine_run_backward

        def running(*args: Any, **kwargs: Any) -> Any:
            # otherwise it is a part of a transform
            if not _torch._C._functorch.get_dynamic_layer_stack_depth():
                self.backward.append(place_here(2))
                self.check()
            return run(*args, **kwargs)

        with replaced(_torch.autograd, "_engine_run_backward", running):
            yield

    def check(self, graph: fx.Graph | None = None) -> None:
        """Raise `InnerGradientError` if a gradient was taken, even if unused, or the graph has transform
        steps."""
        if self.backward:
            raise InnerGradientError(f"The loss takes a gradient itself at {self.backward[0]}.")
        for node in graph.nodes if graph is not None else ():
            if "_functorch" in (getattr(node.target, "__module__", None) or ""):
                raise InnerGradientError(
                    f"The loss uses a transform of torch.func at {node.meta.get('custom', {}).get('place')}."
                )

    def check_error(self, error: Exception) -> None:
        """Raise `InnerGradientError` if `error` comes from `torch.func`."""
        trace, inside = error.__traceback__, False
        while trace:
            inside |= trace.tb_frame.f_code.co_filename in _TRANSFORMS
            trace = trace.tb_next
        if inside or "functorch" in str(error) or "vmap" in str(error):
            raise InnerGradientError(
                f"The loss uses a transform of torch.func at {place_of_error(error.__traceback__)}."
            ) from error


@contextmanager
def accumulation_refused(model: nn.Module) -> Iterator[None]:
    """Raises `CaptureError` where a `backward` inside adds to the gradients of the model's parameters."""
    run = _torch.autograd._engine_run_backward

    def running(*args: Any, **kwargs: Any) -> Any:
        before = {name: parameter.grad for name, parameter in model.named_parameters()}
        found = run(*args, **kwargs)
        for name, parameter in model.named_parameters():
            if parameter.grad is not before[name]:
                raise CaptureError(
                    f"The loss adds to the gradient of {name} by a backward() of its own at {place_here(2)}, beside the gradient that training takes. "
                    f"Take it with torch.autograd.grad, or name what it is for: backward(inputs=[x]). {WAY_OUT}"
                )
        return found

    with replaced(_torch.autograd, "_engine_run_backward", running):
        yield


@contextmanager
def hooks_of_autograd_refused() -> Iterator[None]:
    """Raises `CaptureError` where a tensor's gradient gets a hook, where a module with a backward hook is called, and where hooks change what is
    saved for backward: no trace has any of them."""

    def refuse(what: str) -> NoReturn:
        raise CaptureError(
            f"{what} at {place_here(3)}, and a program computes gradients without hooks. Change the value in the forward, or write an autograd.Function in a module "
            f"of its own. {WAYS_OUT}"
        )

    push = _torch._C._autograd._push_saved_tensors_default_hooks

    def pushing(pack: Any, unpack: Any) -> None:
        # a checkpoint's give back what they got
        if not str(getattr(pack, "__module__", "")).startswith(("torch.", "meshloom.")):
            refuse("Hooks change the tensors that are saved for backward")
        push(pack, unpack)

    def of_module(*_: Any) -> NoReturn:
        refuse("A module with a backward hook is called")

    with (
        replaced(
            Tensor, "register_hook", lambda tensor, hook: refuse("A hook is put on a tensor's gradient")
        ),
        replaced(BackwardHook, "__init__", of_module),
        replaced(nn.Module, "_maybe_warn_non_full_backward_hook", of_module),
        replaced(_torch._C._autograd, "_push_saved_tensors_default_hooks", pushing),
    ):
        yield


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
