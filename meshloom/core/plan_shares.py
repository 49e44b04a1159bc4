"""The setting `shares`: how many samples of a batch each replica, and each of its chunks, gets.

shares=even        equal parts, larger chunks first (default)
shares=3+3+3+1     in these proportions
shares=measured    equal at first, then in proportion to measured speed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import EXCHANGES

_MAX_CHUNKS = 4096  # of a batch with fewer samples; more are a mistake, and each is an entry in lists


class ShareSettings(Protocol):
    """The settings of a plan that are used here."""

    @property
    def dp(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def sync_batch_norm(self) -> bool: ...
    @property
    def exchange(self) -> str: ...
    @property
    def shares(self) -> str: ...


def chunk_sizes_of(plan: ShareSettings, num_samples: int, shares: Sequence[int] = ()) -> list[int]:
    """Samples of each chunk of a batch under a plan, in order of chunks: `Plan.sizes`."""
    shares = shares or fixed_shares(plan.shares)
    if not shares:
        return chunk_sizes(num_samples, plan.dp * plan.microbatches)
    return [size for part in apportion(num_samples, shares) for size in chunk_sizes(part, plan.microbatches)]


def chunk_sizes(num_samples: int, num_chunks: int) -> list[int]:
    """Samples of each chunk when a batch is split contiguously and evenly, larger chunks first.

    >>> chunk_sizes(66, 4), chunk_sizes(2, 4)
    ([17, 17, 16, 16], [1, 1, 0, 0])
    """
    size, larger = divmod(num_samples, num_chunks)
    return [size + (chunk < larger) for chunk in range(num_chunks)]


def apportion(num_samples: int, shares: Sequence[int]) -> list[int]:
    """Samples of each replica, in proportion to `shares`, by largest remainders (ties: the first replica).

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
    """The numbers in the value of `shares`; empty for a word.

    >>> fixed_shares("3+3+3+1"), fixed_shares("even")
    ((3, 3, 3, 1), ())
    """
    return () if text in ("even", "measured") else tuple(int(part) for part in text.split("+"))


def complete_shares(text: str) -> str:
    """The canonical text of the setting. Raises `PlanError`.

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
    """Raise `PlanError` for settings that contradict `shares`."""
    if plan.shares == "even":
        return
    given = fixed_shares(plan.shares)
    if plan.dp == 1:
        raise PlanError(
            f"shares={plan.shares} splits batches over replicas, and dp=1. Use dp=2 or more, or leave shares out."
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


def check_batch(plan: ShareSettings, batch_size: int) -> None:
    """Raise `PlanError` if a batch of `batch_size` samples cannot be run under the plan."""
    num_chunks = plan.dp * plan.microbatches
    if num_chunks > max(batch_size, _MAX_CHUNKS):
        way_out = (
            f"Use dp={batch_size} or less."
            if plan.dp > batch_size
            else f"Use at most {batch_size // plan.dp} microbatches."
        )
        raise PlanError(
            f"dp={plan.dp} x microbatches={plan.microbatches} splits a batch of {batch_size} samples into {num_chunks:,} chunks, of which at least "
            f"{num_chunks - batch_size:,} are empty. {way_out}"
        )
    if plan.sync_batch_norm and not all(chunk_sizes_of(plan, batch_size)):
        shares, way_out = "", f"Use at most {batch_size} chunks"
        if plan.shares != "even":
            shares, way_out = f", shares={plan.shares}", "Use fewer chunks or shares that differ less"
        raise PlanError(
            f"A batch of {batch_size} samples cannot fill {num_chunks} chunks (dp={plan.dp} x microbatches={plan.microbatches}{shares}), "
            f"and sync_batch_norm needs a sample in each. {way_out}, or drop_last=True if this is the short last batch."
        )
