"""Which steps are verified besides those that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.core.job import Job

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


def steps_of_changes(job: Job, first: int, ends: Sequence[int], steps: int, most_samples: int | None) -> list[int]:  # fmt: skip
    """With `ends`, steps at the end of an epoch: the first step from `first` on at which batches get another size, and the first after that end,
    and the first at which something freezes or thaws, as far as a run of `steps` has them. most_samples: how many may be read on the way
    there; None: data on the way is passed over."""
    sizes = sorted(job.batch_sizes)
    edges = sorted(edge for each in job.frozen.values() for edge in (each.start, each.stop))
    after = max(ends, default=first)
    found = [
        next((each for each in changes if begin <= each < steps), None)
        for changes, begin in ((sizes, first), (sizes, after), (edges, first))
    ]
    known = {
        each
        for each in found
        if each is not None
        and (most_samples is None or sum(map(job.batch_size_at, range(each))) <= most_samples)
    }
    return sorted({*ends, *known})
