"""The shares of a batch with which the slowest replica is done first.

A step that all replicas take together lasts as long as its slowest: n samples at c seconds each.

    c = 1, 1, 1, 3      16 samples   4 + 4 + 4 + 4: 12 s      5 + 5 + 5 + 1: 5 s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVERY_STEPS = 10  # between looks at the speeds
LEAST_GAIN = 0.05  # of the predicted time; less would be noise, and new shapes cost something too


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """sizes: samples of each replica in a full batch. reason: why, in words."""

    sizes: tuple[int, ...]
    reason: str


def fastest_sizes(num_samples: int, seconds_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Samples of each replica, at least one, such that max(samples * seconds per sample) is as small as it
    can be.

    Who would be done first with one more gets one more. No such step is needed below the time that fractions
    of samples would take: the start.

    >>> fastest_sizes(16, [1.0, 1.0, 1.0, 3.0]), fastest_sizes(3, [1.0, 9.0, 9.0])
    ((5, 5, 5, 1), (1, 1, 1))
    """
    assert num_samples >= len(seconds_per_sample) and all(each > 0 for each in seconds_per_sample)
    seconds = (num_samples - len(seconds_per_sample)) / sum(1 / each for each in seconds_per_sample)
    sizes = [max(1, int(seconds / each)) for each in seconds_per_sample]
    while sum(sizes) < num_samples:
        next_replica = min(
            range(len(sizes)), key=lambda replica: (sizes[replica] + 1) * seconds_per_sample[replica]
        )
        sizes[next_replica] += 1
    return tuple(sizes)


def propose(sizes: Sequence[int], seconds_per_sample: Sequence[float]) -> Proposal | None:
    """Other sizes of the same batch, if the slowest replica is predicted to be done sooner by `LEAST_GAIN` or
    more. sizes: now, of each replica.

    >>> propose([4, 4, 4, 4], [1.0, 1.0, 1.0, 3.0])
    Proposal(sizes=(5, 5, 5, 1), reason='replica 3 takes 3.0x as long per sample as replica 0')
    >>> propose([4, 4], [1.0, 1.03])
    """
    best = fastest_sizes(sum(sizes), seconds_per_sample)
    if _slowest(best, seconds_per_sample) > (1 - LEAST_GAIN) * _slowest(sizes, seconds_per_sample):
        return None
    slow, fast = (seconds_per_sample.index(extreme(seconds_per_sample)) for extreme in (max, min))
    ratio = seconds_per_sample[slow] / seconds_per_sample[fast]
    return Proposal(
        sizes=best, reason=f"replica {slow} takes {ratio:.1f}x as long per sample as replica {fast}"
    )


def _slowest(sizes: Sequence[int], seconds_per_sample: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(sizes, seconds_per_sample, strict=True))
