"""What the user's code is answered while a step is computed: by `meshloom.step()`, the number of the step; by `gather`, `log` and leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.random import python_draws_of


class Now(NamedTuple):
    """What the user's code is answered in this thread.

    step: by `step()`: a function, as a loss that is being read is answered by an input of its program. gather: by `gather(x)`; None: whoever calls it has
    the whole batch. log: takes what `log(name, value)` is given; None: nobody. leaves: the seed of the chunk that is computed, and the calls of its leaves so far.
    """

    step: Callable[[], Any] | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    log: dict[str, Any] | None = None
    leaves: tuple[int, Counter[str]] | None = None


_NOW: ContextVar[Now] = ContextVar("now")
_OUTSIDE = Now()  # of steps


def step() -> int:
    """The number of the current step: that many updates were done before it, 0 in the first.

    For losses, forwards and metrics: a weight that grows over 1,000 steps is `min(1.0, meshloom.step() / 1000)`.
    In an evaluation it is the number of updates done; a worker of an asynchronous run has the number of the global
    batch that its chunk is of. Exact after a resume. Raises `JobError` elsewhere.

    >>> with at_step(7):
    ...     step()
    7
    """
    answer = _NOW.get(_OUTSIDE).step
    if answer is None:
        raise JobError(
            "meshloom.step() was called where no step is computed. Call it in the loss, in a module's forward or in a metric."
        )
    return answer()


def is_in_a_step() -> bool:
    """Whether this thread computes a step, or a metric, of a job."""
    return _NOW.get(_OUTSIDE).step is not None


def now() -> Now:
    """Of this thread."""
    return _NOW.get(_OUTSIDE)


@contextmanager
def answered_by(**answers: Any) -> Iterator[None]:
    """A context in which this thread's code is answered so. answers: fields of `Now`; others stay."""
    before = _NOW.set(_NOW.get(_OUTSIDE)._replace(**answers))
    try:
        yield
    finally:
        _NOW.reset(before)


@contextmanager
def at_step(number: int) -> Iterator[None]:
    """A context in which this thread computes step `number`."""
    with answered_by(step=lambda: number):
        yield


class Moment(NamedTuple):
    """What code that is not torch's depends on while a chunk is computed: the seed of what `random` and numpy draw, and
    the step."""

    seed: int
    step: int

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which the user's code runs at this moment."""
        with answered_by(step=lambda: self.step, leaves=(self.seed, Counter())), python_draws_of(self.seed):
            yield
