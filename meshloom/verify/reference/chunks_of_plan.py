"""How the samples of a global batch become a plan's chunks: written a second time, to hold the plan's own
cutting against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from meshloom.core.random import Rows


@dataclass(frozen=True, kw_only=True)
class ReferenceShare:
    """What one forward of the reference computes: samples, and which chunks of the plan they are."""

    key: int  # the chunk whose seed decides the draws
    samples: Sequence[Any]
    members: Sequence[tuple[int, Sequence[Any]]]  # chunk index of the plan -> its samples
    rows: Rows | None = None  # of a larger chunk's draws


def shares_of(
    plan: Plan, samples: Sequence[Any], shares: Sequence[int] | None, synchronised: bool = True
) -> Iterator[ReferenceShare]:
    """Non-empty shares in order of execution.

    shares: of the replicas in this step, where they change during the run; None: the plan's. synchronised:
    whether the plan's setting for batch statistics is kept.

    Chunk c = r * m + j is microbatch j of replica r. With synchronised batch statistics one share is
    microbatch j of all
    replicas, in replica order, and j is its key:

        m = 2, dp = 3      chunks  0 1 | 2 3 | 4 5      shares  0 2 4,  1 3 5
    """
    dp, m = plan.dp, plan.microbatches
    if synchronised and plan.sync_batch_norm:
        plan.check_batch(len(samples))
    sizes = _sizes(plan, len(samples), shares)
    pieces = [samples[sum(sizes[:chunk]) : sum(sizes[: chunk + 1])] for chunk in range(dp * m)]
    if synchronised and plan.sync_batch_norm:
        for j in range(m):
            members = [(chunk, pieces[chunk]) for chunk in range(j, dp * m, m)]
            yield ReferenceShare(
                key=j, samples=[sample for _, piece in members for sample in piece], members=members
            )
    else:
        for chunk, piece in enumerate(pieces):
            members = [(chunk, piece)] if piece else []
            if piece and plan.sync_batch_norm:  # as a replica does that keeps its statistics to itself
                together = sizes[chunk % m :: m]
                rows = Rows(sum(together[: chunk // m]), sizes[chunk], sum(together))
                yield ReferenceShare(key=chunk % m, samples=piece, members=members, rows=rows)
            elif piece:
                yield ReferenceShare(key=chunk, samples=piece, members=members)


def _sizes(plan: Plan, num_samples: int, changed: Sequence[int] | None) -> list[int]:
    """Samples of each chunk of a batch: those of a replica are as equal as can be, and so are all chunks
    where nobody set shares."""
    shares: Sequence[int] = (
        () if plan.shares in ("even", "measured") else [int(each) for each in plan.shares.split("+")]
    )
    shares = shares if changed is None else changed
    if not shares:
        return _split(num_samples, plan.dp * plan.microbatches)
    quotas = [Fraction(num_samples * each, sum(shares)) for each in shares]
    counts = [math.floor(quota) for quota in quotas]
    while sum(counts) < num_samples:  # the one furthest below its quota, the first of several
        behind = [quota - count for quota, count in zip(quotas, counts, strict=True)]
        counts[behind.index(max(behind))] += 1
    return [size for count in counts for size in _split(count, plan.microbatches)]


def _split(num_samples: int, parts: int) -> list[int]:
    return [num_samples // parts + (1 if part < num_samples % parts else 0) for part in range(parts)]


def as_sum(value: Any, samples: int) -> tuple[Tensor, float]:
    """The sum of a loss and what to divide it by: given as a pair, or a mean over `samples`."""
    loss, weight = value if isinstance(value, tuple) else (value, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise JobError("The loss must be one number: a mean over the batch's samples, or (sum, weight).")
    return (
        (loss.reshape(()) * samples, float(samples)) if weight is None else (loss.reshape(()), float(weight))
    )
