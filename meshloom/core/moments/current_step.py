"""`meshloom.step()`: the number of the step whose loss is being computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from meshloom.core.errors import JobError
from meshloom.core.moments.leaf_draws import leaves_drawing
from meshloom.core.random import python_draws_of

# What answers `step()` in this thread: a function, as a loss that is being read is answered by an input of its program.
_ANSWER: ContextVar[Callable[[], Any] | None] = ContextVar("step", default=None)


def step() -> int:
    """The number of the current step: that many updates were done before it, 0 in the first.

    For losses, forwards and metrics: a weight that grows over 1,000 steps is `min(1.0, meshloom.step() / 1000)`.
    In an evaluation it is the number of updates done; a worker of an asynchronous run has the number of the global
    batch that its chunk is of. Exact after a resume. Raises `JobError` elsewhere.

    >>> with at_step(7):
    ...     step()
    7
    """
    answer = _ANSWER.get()
    if answer is None:
        raise JobError(
            "meshloom.step() was called where no step is computed. Call it in the loss, in a module's forward or in a metric."
        )
    return answer()


def is_in_a_step() -> bool:
    """Whether this thread computes a step, or a metric, of a job."""
    return _ANSWER.get() is not None


@contextmanager
def answered_by(answer: Callable[[], Any]) -> Iterator[None]:
    """A context in which this thread's `step()` returns what `answer` does."""
    before = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(before)


@contextmanager
def at_step(number: int) -> Iterator[None]:
    """A context in which this thread computes step `number`."""
    with answered_by(lambda: number):
        yield


class Moment(NamedTuple):
    """What code that is not torch's depends on while a chunk is computed: the seed of what `random` and numpy draw, and
    the step."""

    seed: int
    step: int

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which the user's code runs at this moment."""
        with answered_by(lambda: self.step), python_draws_of(self.seed), leaves_drawing(self.seed):
            yield
