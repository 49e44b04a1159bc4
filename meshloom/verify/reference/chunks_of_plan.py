"""How a global batch is split into a plan's chunks: a second, independent implementation that the plan's
own is checked against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from meshloom.core.random import Rows


@dataclass(frozen=True, kw_only=True)
class ReferenceForward:
    """One forward of the reference: its samples, and the plan's chunks that they are."""

    key: int  # the chunk whose seed determines the draws
    samples: Sequence[Any]
    members: Sequence[tuple[int, Sequence[Any]]]  # chunk index of the plan -> its samples
    rows: Rows | None = None  # the rows of a larger chunk's draws


def forwards_of(
    plan: Plan, samples: Sequence[Any], shares: Sequence[int] | None, synchronised: bool = True
) -> Iterator[ReferenceForward]:
    """The non-empty forwards, in order of execution.

    shares: of the replicas in this step, if they change during the run; None: the plan's. synchronised:
    whether to apply the plan's setting for batch statistics.

    Chunk c = r * m + j is microbatch j of replica r. With synchronised batch statistics, one forward is
    microbatch j of all replicas, in replica order, and j is its key:

        m = 2, dp = 3      chunks  0 1 | 2 3 | 4 5      forwards  0 2 4,  1 3 5
    """
    dp, m = plan.dp, plan.microbatches
    if synchronised and plan.sync_batch_norm:
        plan.check_batch(len(samples))
    sizes = _sizes(plan, len(samples), shares)
    pieces = [samples[sum(sizes[:chunk]) : sum(sizes[: chunk + 1])] for chunk in range(dp * m)]
    if synchronised and plan.sync_batch_norm:
        for j in range(m):
            members = [(chunk, pieces[chunk]) for chunk in range(j, dp * m, m)]
            together = [sample for _, piece in members for sample in piece]
            yield ReferenceForward(key=j, samples=together, members=members)
    else:
        for chunk, piece in enumerate(pieces):
            key, rows = chunk, None
            if plan.sync_batch_norm:
                # each replica computes its own statistics, as if they were not synchronised
                key, together = chunk % m, sizes[chunk % m :: m]
                rows = Rows(sum(together[: chunk // m]), sizes[chunk], sum(together))
            if piece:
                yield ReferenceForward(key=key, samples=piece, members=[(chunk, piece)], rows=rows)


def _sizes(plan: Plan, num_samples: int, changed: Sequence[int] | None) -> list[int]:
    """The number of samples of each chunk: as equal as possible within a replica, and over all chunks if
    no shares are set."""
    own = [] if plan.shares in ("even", "measured") else [int(each) for each in plan.shares.split("+")]
    shares = own if changed is None else changed
    if not shares:
        return _split(num_samples, plan.dp * plan.microbatches)
    quotas = [Fraction(num_samples * each, sum(shares)) for each in shares]
    counts = [math.floor(quota) for quota in quotas]
    while sum(counts) < num_samples:  # the chunk furthest below its quota; the first one of equals
        behind = [quota - count for quota, count in zip(quotas, counts, strict=True)]
        counts[behind.index(max(behind))] += 1
    return [size for count in counts for size in _split(count, plan.microbatches)]


def _split(num_samples: int, parts: int) -> list[int]:
    return [num_samples // parts + (1 if part < num_samples % parts else 0) for part in range(parts)]


def as_sum(value: Any, samples: int) -> tuple[Tensor, float]:
    """The loss as a sum and its divisor: `value` is either that pair, or a mean over `samples`."""
    loss, weight = value if isinstance(value, tuple) else (value, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise JobError("The loss must be one number: a mean over the batch's samples, or (sum, weight).")
    loss = loss.float() if loss.dtype == torch.float16 else loss  # whose largest number is 65504
    loss = loss.reshape(())
    return (loss * samples, float(samples)) if weight is None else (loss, float(weight))
