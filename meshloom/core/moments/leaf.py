"""`@ml.leaf`: a function that is never looked into, as each of its calls is one operator of a captured program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from meshloom.core.errors import JobError
from meshloom.core.moments.leaf_draws import next_call_of

P = ParamSpec("P")
R = TypeVar("R")
Answer = Callable[["LeafFunction[..., Any]", tuple[Any, ...], dict[str, Any]], Any]

# What takes calls of leaf functions in this thread, while a loss is recorded or exported; None: they are the functions.
_ANSWER: ContextVar[Answer | None] = ContextVar("leaf", default=None)
# Those that live: a rank finds the functions of a program by their names.
_MADE: WeakSet[LeafFunction[..., Any]] = WeakSet()


class LeafFunction(Generic[P, R]):
    """A marked function, of a module or of a class. name: its module and qualified name."""

    __wrapped__: Callable[P, R]
    __qualname__: str

    def __init__(self, function: Callable[P, R]) -> None:
        if not isinstance(function, FunctionType):
            raise JobError(
                f"@ml.leaf marks a function, not a {type(function).__name__}. Write it below @staticmethod, @classmethod or @property; name a module "
                "in Job(leaves=[...])."
            )
        update_wrapper(self, function)
        self.name = f"{function.__module__}:{function.__qualname__}"
        self._function = function
        _MADE.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        answer = _ANSWER.get()
        if answer is not None:
            return answer(self, args, kwargs)
        with next_call_of(self.name):
            return self.__wrapped__(*args, **kwargs)

    def closure(self) -> Mapping[str, Any]:
        """What it closes over, if it is defined inside of another function."""
        if "<locals>" not in self.name:
            return {}
        return inspect.getclosurevars(self._function).nonlocals

    @property
    def place(self) -> str:
        """Its name and line."""
        code = self._function.__code__
        return f"{self.__qualname__} ({code.co_filename}:{code.co_firstlineno})"

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> str:
        return self.__qualname__


def leaf(function: Callable[P, R]) -> LeafFunction[P, R]:
    """Mark a function that runs as written under every plan: a leaf.

    Under tp, pp, recompute and prediction a loss is captured, and what values decide cannot be. Each call of a marked function
    is one operator instead: whole on every rank of tp, within one stage of pp, never run twice by recompute. Elsewhere the mark does nothing.

    Modules (also `self`) and whatever has a gradient come in by its arguments, besides plain values and tuples, lists and dicts
    of all these; it returns tensors, whose shapes follow from the arguments' shapes. It writes none of its arguments and keeps nothing.

    >>> @leaf
    ... def double(x: float) -> float:
    ...     return 2 * x
    >>> double(3.0)
    6.0
    """
    return LeafFunction(function)


def leaf_functions(name: str) -> list[LeafFunction[..., Any]]:
    """The leaf functions of this name."""
    return [each for each in _MADE if each.name == name]


@contextmanager
def leaf_calls_to(answer: Answer | None) -> Iterator[None]:
    """A context in which calls of leaf functions in this thread go to `answer`."""
    before = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(before)
