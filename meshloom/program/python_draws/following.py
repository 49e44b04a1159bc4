"""Follows a loss while it runs: what it draws with `random`, numpy and `meshloom.step()` is recorded as a path."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshloom.core.errors import CaptureError
from meshloom.core.moments.current_step import Moment, answered_by
from meshloom.program.ir.lines import WAY_OUT, SourceLine, describe_line, place_here
from meshloom.program.ir.replaced import replaced
from meshloom.program.python_draws.drawn import Drawn, call_torch, expression_of, holds_drawn, refused
from meshloom.program.python_draws.paths import Event, Expression, Generators, Path, as_input

RANDOM = """
    random uniform randint randrange gauss normalvariate betavariate expovariate triangular lognormvariate gammavariate sample choices
"""
NUMPY = """
    random random_sample rand randn uniform normal standard_normal beta binomial randint permutation choice exponential gamma poisson
    dirichlet laplace gumbel logistic lognormal multinomial
"""
_CHANGE_IN_PLACE = {"random": ("shuffle",), "numpy.random": ("shuffle",)}
_MATH = "sqrt exp log log2 log10 sin cos tan tanh sinh cosh floor ceil pow atan atan2 erf"


MAX_WAYS = 16  # on which a loss may go, each a program


class Follower:
    """forced: outcomes of the first tests, whatever is drawn. inputs: the tensors that inputs are, in order; None: their
    values at `moment`."""

    def __init__(
        self, moment: Moment, forced: Sequence[Any] = (), inputs: Sequence[Tensor] | None = None
    ) -> None:
        self.events: list[Event] = []
        self.alternatives: list[tuple[Any, ...]] = []  # to the outcome of each test
        self.lines: list[SourceLine | None] = []  # of each test
        self.calls = 0  # of functions of torch
        self._generators = Generators(moment)
        self._forced, self._inputs = forced, inputs
        self._values: list[Any] = []
        self._whole: dict[Expression, Sequence[int]] = {}  # what a drawn whole number may be
        self._outcomes: dict[Expression, Any] = {}
        self._tensors: dict[Expression, Tensor] = {}

    @property
    def path(self) -> Path:
        """The path so far."""
        return Path(tuple(self.events))

    @contextmanager
    def following(self) -> Iterator[None]:
        """The context in which the loss runs."""
        with ExitStack() as around:
            for kind, module, names in (("random", random, RANDOM), ("numpy.random", numpy.random, NUMPY)):
                for name in names.split():
                    around.enter_context(replaced(module, name, self._drawing(kind, name)))
                for name in _CHANGE_IN_PLACE[kind]:
                    around.enter_context(replaced(module, name, _refusing(f"{kind}.{name}")))
            around.enter_context(replaced(random, "choice", self._choice))
            for name in _MATH.split():
                around.enter_context(replaced(math, name, _of_drawn(f"math.{name}", getattr(math, name))))
            around.enter_context(replaced(torch, "from_numpy", _from_numpy(torch.from_numpy)))
            around.enter_context(answered_by(lambda: self._draw(("step",))))
            around.enter_context(_InTorch(self))
            yield

    def test(self, drawn: Drawn) -> Any:
        """The outcome of a test."""
        expression = drawn.expression
        if expression not in self._outcomes:
            whole = not isinstance(drawn.value, bool | numpy.bool_)
            options = self._whole.get(expression, ()) if whole else (True, False)
            if not 0 < len(options) <= MAX_WAYS:
                raise refused("the number itself is needed")
            number = len(self._outcomes)
            own = int(drawn.value) if whole else bool(drawn.value)
            outcome = self._forced[number] if number < len(self._forced) else own
            self._outcomes[expression] = outcome
            self.events.append(("test", expression, outcome))
            self.alternatives.append(tuple(each for each in options if each != outcome))
            self.lines.append(place_here(2).line)
        return self._outcomes[expression]

    def tensor(self, drawn: Drawn) -> Tensor:
        """The input that a number or an array is."""
        expression = drawn.expression
        if expression not in self._tensors:
            number = len(self._tensors)
            if self._inputs is not None and number >= len(self._inputs):
                raise CaptureError(_differently(place_here(2).line))
            self._tensors[expression] = (
                as_input(drawn.value) if self._inputs is None else self._inputs[number]
            )
            self.events.append(("input", expression))
        return self._tensors[expression]

    def _draw(self, event: Event) -> Drawn:
        self.events.append(event)
        value = self._generators.draw(event, self._values)
        self._values.append(value)
        return Drawn(self, ("drawn", len(self._values) - 1), value)

    def _drawing(self, kind: str, name: str) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            given = tuple(map(expression_of, args))
            named = tuple((key, expression_of(each)) for key, each in kwargs.items())
            drawn = self._draw(("draw", kind, name, given, named))
            if name in ("randint", "randrange") and not kwargs and not holds_drawn(args):
                ends = (
                    range(*args) if name == "randrange" or kind != "random" else range(args[0], args[1] + 1)
                )
                self._whole[drawn.expression] = ends
            return drawn

        return draw

    def _choice(self, options: Sequence[Any]) -> Any:
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in options)
        one_of = options if numbers else range(len(options))
        drawn = self._draw(("draw", "random", "choice", (expression_of(one_of),), ()))
        if all(isinstance(each, int) for each in one_of):
            self._whole[drawn.expression] = tuple(dict.fromkeys(one_of))
        return drawn if numbers else options[int(drawn)]


class _InTorch(TorchFunctionMode):
    """Puts tensors in the places of drawn values, in lists and indices, too."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._follower.calls += 1
        kwargs = kwargs or {}
        if holds_drawn(args) or holds_drawn(kwargs):
            return call_torch(func, args, kwargs)
        return func(*args, **kwargs)


def _differently(line: SourceLine | None) -> str:
    return (
        f"What {describe_line(line)} draws with random or numpy depends on more than the batch's shapes and earlier draws. "
        f"Draw with torch (torch.rand, torch.randint). {WAY_OUT}"
    )


def check_followed(follower: Follower, path: Path) -> None:
    """Raise `CaptureError` if a loss went another way than this path."""
    if follower.path != path:
        raise CaptureError(_differently(next((each for each in follower.lines if each), None)))


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise refused(f"{name} changes its argument in place; use random.sample or numpy.random.permutation")

    return refuse


def _of_drawn(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        drawn = next((each for each in args if isinstance(each, Drawn)), None)
        return drawn.made(name, *args) if drawn is not None else function(*args)

    return call


def _from_numpy(function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return lambda array: array.following.tensor(array) if isinstance(array, Drawn) else function(array)
