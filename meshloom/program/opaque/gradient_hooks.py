"""Sees the hooks that code puts on nodes of autograd's graph, and on what is saved for them, of which no operator tells.

h.grad_fn.register_prehook(hook)                        on a node of autograd's graph
h.grad_fn.next_functions[0][0].register_hook(hook)
block.register_full_backward_hook(hook)                 torch puts it on a node when the module is called
with saved_tensors_hooks(pack, unpack): ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from meshloom.program.ir.replaced import replaced

_torch: Any = torch  # for private names
_TORCH = Path(torch.__file__).parent
_OURS = str(_TORCH), str(Path(__file__).parents[2])
# where torch puts the backward hooks of modules on nodes
_OF_MODULES = str(_TORCH / "nn/modules/module.py"), str(_TORCH / "utils/hooks.py")


@contextmanager
def node_hooks_seen(note: Callable[[Any], None]) -> Iterator[None]:
    """Tells `note` of each node that gets a hook, before it does, or whose edge is given to code that may put one there."""
    get = _torch._C.TensorBase.grad_fn.__get__

    def grad_fn(tensor: Tensor) -> Any:
        node, frame = get(tensor), sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if node is None:
            return None
        if _is_edge(frame):
            note(node)
        file = frame.f_code.co_filename
        return node if file.startswith(_OURS) and file not in _OF_MODULES else _SeenNode(node, note)

    with replaced(Tensor, "grad_fn", property(grad_fn)):
        yield


@contextmanager
def saving_hooks_seen(note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` before code changes how tensors are saved for backward, other than torch does."""
    push = _torch._C._autograd._push_saved_tensors_default_hooks

    def pushing(pack: Any, unpack: Any) -> None:
        # a checkpoint's give back what they got
        if not str(getattr(pack, "__module__", "")).startswith(("torch.", "meshloom.")):
            note()
        push(pack, unpack)

    with replaced(_torch._C._autograd, "_push_saved_tensors_default_hooks", pushing):
        yield


def _is_edge(frame: FrameType) -> bool:
    """Whether it is `torch.autograd.graph.get_gradient_edge` that asks for a node."""
    return frame.f_code.co_name == "_get_grad_fn_or_grad_acc" and (
        frame.f_back is not None and frame.f_back.f_code.co_name == "get_gradient_edge"
    )


class _SeenNode:
    """A node as code sees it, with those that it leads to."""

    def __init__(self, node: Any, note: Callable[[Any], None]) -> None:
        self._node, self._note = node, note

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._node)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple(
            (None if node is None else _SeenNode(node, self._note), number)
            for node, number in self._node.next_functions
        )

    def register_hook(self, hook: Any) -> RemovableHandle:
        self._note(self._node)
        return self._node.register_hook(hook)

    def register_prehook(self, hook: Any) -> RemovableHandle:
        self._note(self._node)
        return self._node.register_prehook(hook)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __call__(self, *args: Any) -> Any:
        return self._node(*args)

    def __eq__(self, other: object) -> bool:
        return self._node == (vars(other)["_node"] if type(other) is _SeenNode else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)
