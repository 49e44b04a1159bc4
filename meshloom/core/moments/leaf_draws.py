"""What `random` and numpy draw in a leaf: at each of its calls from a seed of (chunk, leaf, number of the call), so that it is
the same wherever, and beside whatever else, the leaf runs.

    Job(leaves=["router"])          a call of the router draws alike on one device, on replicas and in programs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import nn

from meshloom.core.random import derive, python_draws_of

# The seed of the chunk that this thread computes, and the calls of its leaves so far.
_CHUNK: ContextVar[tuple[int, Counter[str]] | None] = ContextVar("chunk", default=None)


@contextmanager
def leaves_drawing(seed: int) -> Iterator[None]:
    """A context in which this thread computes a chunk of this seed."""
    before = _CHUNK.set((seed, Counter()))
    try:
        yield
    finally:
        _CHUNK.reset(before)


def call_of_leaf(path: str, number: int) -> AbstractContextManager[None]:
    """The context of a leaf's call of this number in a chunk; outside of a chunk nothing."""
    chunk = _CHUNK.get()
    return python_draws_of(derive(chunk[0], "leaf", path, number)) if chunk else nullcontext()


@contextmanager
def leaves_in(model: nn.Module, leaves: Collection[str]) -> Iterator[None]:
    """A context in which calls of these modules of `model`, which runs as written, draw as leaves do."""
    with ExitStack() as around:
        for path in leaves:
            around.enter_context(_calls_of(path, model.get_submodule(path)))
        yield


@contextmanager
def _calls_of(path: str, module: nn.Module) -> Iterator[None]:
    entered: list[ExitStack] = []

    def begin(module: nn.Module, args: Any) -> None:
        call, chunk = ExitStack(), _CHUNK.get()
        if chunk:
            number = chunk[1][path]
            chunk[1][path] += 1
            call.enter_context(call_of_leaf(path, number))
        entered.append(call)

    def end(module: nn.Module, args: Any, result: Any) -> None:
        entered.pop().close()

    hooks = (
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end, always_call=True),
    )
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
