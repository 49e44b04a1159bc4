"""Which steps are verified besides those that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

MOST_SKIPPED = 24  # steps further, until a loss scale has fallen so far that a first update is made


def steps_at_epoch_end(length: int, taken: Sequence[range], steps: int, *, repeats: bool) -> list[int]:
    """The last step of an epoch and the first of the next, as far as a run of `steps` has them; none where both were taken in one
    stretch, in which data is read without a break.

    length: of the first epoch, in steps. taken: stretches of steps, in order. repeats: whether all epochs have this length.

    >>> steps_at_epoch_end(5, [range(1), range(1, 3)], 40, repeats=True)
    [4, 5]
    >>> steps_at_epoch_end(3, [range(1), range(1, 3)], 40, repeats=True)
    [5, 6]
    >>> steps_at_epoch_end(3, [range(1), range(1, 3)], 40, repeats=False)
    [3]
    >>> steps_at_epoch_end(2, [range(1), range(1, 3)], 40, repeats=True)
    []
    """
    end = taken[-1].stop
    for first in range(length, steps, length) if repeats else range(length, min(length + 1, steps)):
        if any(first - 1 in stretch and first in stretch for stretch in taken):
            return []
        if first > end:
            return [first - 1, first]
    return [step for step in (length - 1, length) if end <= step < steps]
