"""The shares of a batch that minimize the time of the slowest replica.

A synchronous step takes as long as its slowest replica: n samples at c seconds each.

    c = 1, 1, 1, 3      16 samples   4 + 4 + 4 + 4: 12 s      5 + 5 + 5 + 1: 5 s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVERY_STEPS = 10  # between two measurements of speed
MIN_GAIN = 0.05  # of the predicted time; less is noise, and new shapes have a cost


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """New shares. sizes: samples of each replica in a full batch. reason: a clause."""

    sizes: tuple[int, ...]
    reason: str


def fastest_sizes(num_samples: int, seconds_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Samples of each replica, at least one, that minimize max(samples * seconds per sample).

    Greedy: the next sample goes to the replica that would finish first with it. It starts from the integer
    parts of the optimal fractional sizes.

    >>> fastest_sizes(16, [1.0, 1.0, 1.0, 3.0]), fastest_sizes(3, [1.0, 9.0, 9.0])
    ((5, 5, 5, 1), (1, 1, 1))
    """
    assert num_samples >= len(seconds_per_sample) and all(each > 0 for each in seconds_per_sample)
    seconds = (num_samples - len(seconds_per_sample)) / sum(1 / each for each in seconds_per_sample)
    sizes = [max(1, int(seconds / each)) for each in seconds_per_sample]
    while sum(sizes) < num_samples:
        finished = [(size + 1) * each for size, each in zip(sizes, seconds_per_sample, strict=True)]
        sizes[finished.index(min(finished))] += 1
    return tuple(sizes)


def propose(sizes: Sequence[int], seconds_per_sample: Sequence[float]) -> Proposal | None:
    """New sizes of a batch if the slowest replica is predicted to gain at least `MIN_GAIN`; otherwise None.

    sizes: the present ones, of each replica.

    >>> propose([4, 4, 4, 4], [1.0, 1.0, 1.0, 3.0])
    Proposal(sizes=(5, 5, 5, 1), reason='replica 3 takes 3.0x as long per sample as replica 0')
    >>> propose([4, 4], [1.0, 1.03])
    """
    best = fastest_sizes(sum(sizes), seconds_per_sample)
    if _slowest(best, seconds_per_sample) > (1 - MIN_GAIN) * _slowest(sizes, seconds_per_sample):
        return None
    slow, fast = (seconds_per_sample.index(extreme(seconds_per_sample)) for extreme in (max, min))
    ratio = seconds_per_sample[slow] / seconds_per_sample[fast]
    reason = f"replica {slow} takes {ratio:.1f}x as long per sample as replica {fast}"
    return Proposal(sizes=best, reason=reason)


def _slowest(sizes: Sequence[int], seconds_per_sample: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(sizes, seconds_per_sample, strict=True))
