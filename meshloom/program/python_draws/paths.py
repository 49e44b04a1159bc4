"""A path: what a loss draws with `random` and numpy, what it makes of it, and which ways it goes because of it.

    if random.random() < 0.1:        drawn 0 = random.random();  drawn 0 < 0.1 was False
        return x
    x * (1 - numpy.random.beta(...)) drawn 1 = numpy.random.beta(...);  input: 1 - drawn 1

A path can be followed for any seed and step without running the loss: its draws and sums are Python's own, so that
inputs have the very bits that eager has.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from meshloom.core.moments.current_step import Moment
from meshloom.core.random import python_generators

# An expression: ("drawn", number), or (name of a function, argument, ...); arguments that are constants are
# ("constant", value). Nested tuples of literals, so that its text can be read back.
Expression = tuple[Any, ...]
# ("draw", generator, method, arguments, keywords), ("step",), ("test", expression, outcome) or ("input", expression)
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Path:
    """events: in the order in which the loss came to them."""

    events: tuple[Event, ...]

    @property
    def text(self) -> str:
        """From which `Path.parse` makes it again."""
        return repr(self.events)

    @staticmethod
    def parse(text: str) -> Path:
        """The path of a text."""
        return Path(ast.literal_eval(text))

    @property
    def outcomes(self) -> tuple[Any, ...]:
        """Of its tests, in order."""
        return tuple(event[2] for event in self.events if event[0] == "test")

    def inputs(self, moment: Moment, *, whatever: bool = False) -> list[Tensor] | None:
        """What the loss's programs for this path are given at a moment; None if the loss goes another way then.

        whatever: as if the tests had this path's outcomes.
        """
        generators, values, found = Generators(moment), list[Any](), list[Tensor]()
        for event in self.events:
            match event:
                case "test", expression, outcome:
                    if not whatever and evaluate(expression, values) != outcome:
                        return None
                case "input", expression:
                    found.append(as_input(evaluate(expression, values)))
                case _:
                    values.append(generators.draw(event, values))
        return found


class Generators:
    """Those of `random` and numpy as they are at the beginning of a chunk, without touching the global ones."""

    def __init__(self, moment: Moment) -> None:
        of_python, of_numpy = python_generators(moment.seed)
        self._of: Mapping[str, Any] = {"random": of_python, "numpy.random": of_numpy}
        self._step = moment.step

    def draw(self, event: Event, values: list[Any]) -> Any:
        """The value of a "draw" or of a "step"."""
        if event[0] == "step":
            return self._step
        _, generator, method, args, kwargs = event
        given = [evaluate(each, values) for each in args]
        return getattr(self._of[generator], method)(
            *given, **{key: evaluate(each, values) for key, each in kwargs}
        )


def evaluate(expression: Expression, values: list[Any]) -> Any:
    """The value of an expression of drawn values.

    >>> evaluate(("sub", ("constant", 1), ("drawn", 0)), [0.25])
    0.75
    """
    name, *args = expression
    if name == "constant":
        return args[0]
    if name == "drawn":
        return values[args[0]]
    return function_of(name)(*(evaluate(each, values) for each in args))


def function_of(name: str) -> Callable[..., Any]:
    """The function of a name in expressions: of `operator`, `math.*`, `numpy.*`, or a method of an array."""
    room, _, own = name.rpartition(".")
    if room == "math":
        return getattr(math, own)
    if room == "numpy":
        return getattr(numpy, own)
    if room == "method":
        return lambda value, *args: getattr(value, own)(*args)
    return _OTHERS.get(name) or getattr(operator, name)


_OTHERS: Mapping[str, Callable[..., Any]] = {"round": round, "truth": bool}


def as_input(value: Any) -> Tensor:
    """A tensor for a number, in double precision, or for an array."""
    if isinstance(value, bool | int | numpy.integer | numpy.bool_):
        return torch.tensor(bool(value) if isinstance(value, bool | numpy.bool_) else int(value))
    if isinstance(value, float | numpy.floating):
        return torch.tensor(float(value), dtype=torch.float64)
    return torch.tensor(value)
