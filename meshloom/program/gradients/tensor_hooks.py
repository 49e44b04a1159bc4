"""Hooks on the gradients of tensors (`Tensor.register_hook`) as operators of a trace.

A hook B that is linear in the gradient, such as the fixed-point iteration of an equilibrium model's backward, is the
gradient of its own transpose, and autograd gives the transpose of what it can follow:

    y = z + B^T (z - z)    with the first and the last z detached

has the value of z, and the gradient of y becomes B of it. Whatever uses z after the hook was registered uses y.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils.hooks import RemovableHandle

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAY_OUT, SourcePlace, place_here
from meshloom.program.ir.replaced import replaced

_torch: Any = torch  # for private names


@dataclass(frozen=True)
class _Hooked:
    """Nodes of a tensor with a hook: itself, what is used instead, and the gradient that the hook was tried with."""

    tensor: fx.Node
    instead: fx.Node
    gradient: fx.Node
    place: SourcePlace


@dataclass
class TensorHooks:
    """The hooks that were registered in one trace."""

    found: list[_Hooked] = field(default_factory=list[_Hooked])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records hooks instead of registering them."""

        def register(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
            self._record(tensor, hook, place_here(2))
            return RemovableHandle(OrderedDict())

        with replaced(Tensor, "register_hook", register):
            yield

    def apply(self) -> None:
        """Lets later nodes use what has the hook. Raises `CaptureError` if a hook is not linear: what its transpose
        computes would depend on the gradient."""
        for each in self.found:
            if each.gradient in _ancestors(each.instead):
                raise _refused(each.place)
            for user in list(each.tensor.users):
                if each.instead < user:
                    user.replace_input_with(each.tensor, each.instead)

    def _record(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None], place: SourcePlace) -> None:
        with torch.enable_grad(), replaced(_torch.autograd, "_engine_run_backward", _differentiable()):
            gradient = torch.zeros_like(tensor).requires_grad_(True)
            version = gradient._version  # pyright: ignore[reportPrivateUsage]
            made = hook(gradient)
            is_written = version != gradient._version  # pyright: ignore[reportPrivateUsage]
            if made is None and not is_written:  # it only looks
                return
            if made is None or is_written or not made.requires_grad:
                raise _refused(place)
            value = tensor.detach()
            (transposed,) = torch.autograd.grad(
                made, gradient, tensor - value, create_graph=True, materialize_grads=True
            )
            instead = value + transposed
        self.found.append(_Hooked(_node_of(tensor, place), _node_of(instead, place), _node_of(gradient, place), place))  # fmt: skip


def _differentiable() -> Any:
    """Autograd's engine, whose results always have gradients."""
    run = _torch.autograd._engine_run_backward

    def running(
        outputs: Any, gradients: Any, keep_graph: bool, create_graph: bool, *args: Any, **kwargs: Any
    ) -> Any:
        return run(outputs, gradients, True, True, *args, **kwargs)

    return running


def _node_of(tensor: Tensor, place: SourcePlace) -> fx.Node:
    mode = get_proxy_mode()
    assert mode is not None
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:  # inside a transform of torch.func
        raise _refused(place)
    return slot.proxy.node


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _refused(place: SourcePlace) -> CaptureError:
    return CaptureError(
        f"The hook on a tensor's gradient at {place} is not linear in the gradient, or autograd cannot follow it, which a program cannot represent. "
        f"Make it a sum or a product with what does not depend on the gradient. {WAY_OUT}"
    )
