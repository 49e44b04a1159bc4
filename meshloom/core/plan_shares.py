"""The setting that says how much of a batch each replica gets: its text, what it goes with, and the samples
that it comes to.

shares=even        as many for each, larger chunks first (default)
shares=3+3+3+1     in these proportions
shares=measured    even at first, then in proportion to measured speed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import EXCHANGES


class ShareSettings(Protocol):
    """What is looked at here of a plan."""

    @property
    def dp(self) -> int: ...
    @property
    def sync_batch_norm(self) -> bool: ...
    @property
    def exchange(self) -> str: ...
    @property
    def shares(self) -> str: ...


def apportion(num_samples: int, shares: Sequence[int]) -> list[int]:
    """Samples of each replica, in proportion to `shares`: the exact quotas rounded down, what is left to the
    largest remainders, then to the first.

    >>> apportion(64, (3, 3, 3, 1)), apportion(66, (1, 1, 1, 1)), apportion(2, (1, 5, 5))
    ([19, 19, 19, 7], [17, 17, 16, 16], [0, 1, 1])
    """
    total = sum(shares)
    sizes = [num_samples * share // total for share in shares]
    by_remainder = sorted(
        range(len(shares)), key=lambda replica: (-(num_samples * shares[replica] % total), replica)
    )
    for replica in by_remainder[: num_samples - sum(sizes)]:
        sizes[replica] += 1
    return sizes


def fixed_shares(text: str) -> tuple[int, ...]:
    """The numbers of a setting made by `complete_shares`; none when it is a word.

    >>> fixed_shares("3+3+3+1"), fixed_shares("even")
    ((3, 3, 3, 1), ())
    """
    return () if text in ("even", "measured") else tuple(int(part) for part in text.split("+"))


def complete_shares(text: str) -> str:
    """The setting in the one way in which it is written. Raises `PlanError`.

    >>> complete_shares("6 + 6 + 2"), complete_shares("measured")
    ('3+3+1', 'measured')
    """
    if text in ("even", "measured"):
        return text
    parts = [part.strip() for part in text.split("+")]
    if not all(part.isascii() and part.isdecimal() for part in parts) or not any(int(part) for part in parts):
        raise PlanError(
            f"shares={text} is not even, measured, or a whole number for each replica, not all 0, joined by +. Write it like shares=3+3+3+1."
        )
    numbers = [int(part) for part in parts]
    return "+".join(str(number // math.gcd(*numbers)) for number in numbers)


def check_shares(plan: ShareSettings) -> None:
    """Raise `PlanError` for settings that do not go together."""
    if plan.shares == "even":
        return
    given = fixed_shares(plan.shares)
    if plan.dp == 1:
        raise PlanError(
            f"shares={plan.shares} divides batches over replicas, and dp=1. Use dp=2 or more, or leave shares out."
        )
    if given and len(given) != plan.dp:
        raise PlanError(
            f"shares={plan.shares} is for {len(given)} replicas, and dp={plan.dp}. Give one number for each replica."
        )
    if not EXCHANGES[plan.exchange].synchronous:
        raise PlanError(
            f"shares={plan.shares} is for steps taken together; with exchange=async fast workers push more often. Leave shares out."
        )
    if EXCHANGES[plan.exchange].independent:
        raise PlanError(
            f"shares={plan.shares} would not keep the mean: with exchange={plan.exchange} every replica's parameters count the same, however many "
            "samples it had. Use exchange=all_reduce or server, or leave shares out."
        )
    if plan.sync_batch_norm and not given:
        raise PlanError(
            "shares=measured may leave a slow replica without samples in a short batch, and sync_batch_norm=true needs some in every chunk. "
            "Give the shares by hand, like shares=3+3+3+1, or use sync_batch_norm=false."
        )


def chunk_sizes(num_samples: int, num_chunks: int) -> list[int]:
    """Samples per chunk when a batch is cut contiguously, larger ones first.

    >>> chunk_sizes(66, 4), chunk_sizes(2, 4)
    ([17, 17, 16, 16], [1, 1, 0, 0])
    """
    size, larger = divmod(num_samples, num_chunks)
    return [size + (chunk < larger) for chunk in range(num_chunks)]
