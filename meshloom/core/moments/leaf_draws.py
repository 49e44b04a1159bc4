"""What `random` and numpy draw in a leaf: at each of its calls from a seed of (chunk, leaf, number of the call), so that it is
the same wherever, and beside whatever else, the leaf runs.

    Job(leaves=["router"])          a call of the router draws alike on one device, on replicas and in programs
    @ml.leaf                  and so does one of a marked function
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from meshloom.core.modules.named_leaves import is_function
from meshloom.core.moments.current_step import answered_by, now
from meshloom.core.random import derive, python_draws_of


def call_of_leaf(name: str, number: int) -> AbstractContextManager[None]:
    """The context of a leaf's call of this number in a chunk; outside of a chunk, and inside of a leaf, nothing."""
    chunk = now().leaves
    return _alone(derive(chunk[0], "leaf", name, number)) if chunk else nullcontext()


def next_call_of(name: str) -> AbstractContextManager[None]:
    """The context of a leaf's next call in a chunk."""
    chunk = now().leaves
    if chunk is None:
        return nullcontext()
    number = chunk[1][name]
    chunk[1][name] += 1
    return call_of_leaf(name, number)


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    with answered_by(leaves=None), python_draws_of(seed):
        yield


@contextmanager
def leaves_in(model: nn.Module, leaves: Collection[str]) -> Iterator[None]:
    """A context in which calls of these modules of `model`, which runs as written, draw as leaves do."""
    with ExitStack() as around:
        for path in leaves:
            if not is_function(path):
                around.enter_context(_calls_of(path, model.get_submodule(path)))
        yield


@contextmanager
def _calls_of(path: str, module: nn.Module) -> Iterator[None]:
    entered: list[ExitStack] = []

    def begin(module: nn.Module, args: Any) -> None:
        call = ExitStack()
        call.enter_context(next_call_of(path))
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
