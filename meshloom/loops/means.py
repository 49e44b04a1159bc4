"""`ml.mean`, `ml.sum` and `ml.gather` in a loop of one's own: of the global batch, the same bits on every rank, with the gradient that one
device has.

A replica's gradients count by its share of the batch where they are summed (`gradient_mean.py`), n_r of N samples. So what a rank passes back to
a value of its own is what one device would, times N / n_r; for a mean by samples that is 1.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.objects import gather_objects, scatter_objects
from meshloom.comm.recording import RecordedGroup
from meshloom.core.errors import JobError, TrainingError
from meshloom.core.moments import gather as of_jobs
from meshloom.core.moments.current_step import is_in_a_step
from meshloom.loops.ranks import LoopRanks, has_ranks, ranks
from meshloom.loops.taken_shares import TakenShare, bound
from meshloom.replica.exchanges.gathered_rows import joined_rows, summed_rows


def mean(x: Any, count: Any = None) -> Any:
    """The mean over the global batch, on every rank.

    x: a mean over this replica's share, which counts by the share's samples; with `count`, a total over the share, and the result is the sum of
    all totals divided by the sum of all counts. A tensor of any shape, with gradient; or a number, and the result is one. Every replica calls it.

    >>> mean(0.5), mean(6.0, 4)
    (0.5, 1.5)
    """
    if count is not None:
        return sum(x) / sum(count)
    return reduced(x, by_samples=True)


def sum(x: Any) -> Any:  # noqa: A001
    """The sum over replicas, on every rank. x: a sum over this replica's share: a tensor of any shape, with gradient; or a number. For a loss
    that is a sum over samples, and for counts. Every replica calls it.

    >>> sum(3)
    3
    """
    return reduced(x, by_samples=False)


def gather(x: Any) -> Any:
    """The rows of all replicas in the order of the batch, on every rank. x: a tensor whose dim 0 are rows of this replica's share, with gradient;
    or a list, whose items are any objects. For losses over pairs (gather results and labels, and write the loss as it stands) and for metrics.
    In the loss or forward of a `Job`: see `meshloom.core.moments.gather`. Every replica calls it.
    """
    found = _several()
    if isinstance(x, Tensor):
        return of_jobs.gather(x) if found is None else _GatheredRows.apply(x, found)
    if is_in_a_step():
        return of_jobs.gather(x)  # which refuses it
    if not isinstance(x, list):
        raise TrainingError(f"ml.gather() takes a tensor of rows or a list, not a {type(x).__name__}.")
    if found is None:
        return x
    readers = found.own.readers
    lists = gather_objects(readers, x if _counts(found) else [])
    lists = scatter_objects(readers, [lists] * readers.size if lists else None)
    return [item for each in lists for item in each]


def reported(x: Any) -> Any:
    """`x`, which an adapter returns in place of a `mean` or `sum`: `meshloom verify` compares it, too."""
    return x


def reduced(x: Any, *, by_samples: bool) -> Any:
    """`mean` or `sum`, without the notice of `verify`."""
    if is_in_a_step():
        raise JobError(
            "ml.mean() and ml.sum() are for loops of one's own. A job's loss is the mean over its samples on every plan; return (sum, weight) where it averages over "
            "something else."
        )
    found = _several()
    if found is None or isinstance(x, str):
        return x
    if isinstance(x, Tensor):
        return _Reduced.apply(x, found, by_samples)
    if isinstance(x, Sequence):
        return type(x)(reduced(each, by_samples=by_samples) for each in x)  # pyright: ignore[reportCallIssue]
    kind = int if isinstance(x, int) and not by_samples else float
    dtype = torch.int64 if kind is int else torch.float64
    return kind(_Reduced.apply(torch.tensor(x, dtype=dtype, device=found.device), found, by_samples))


def _several() -> LoopRanks | None:
    """The script's ranks; None: there is one replica."""
    return found if has_ranks() and (found := ranks()).plan.dp > 1 else None


def _share(found: LoopRanks) -> TakenShare:
    """What the newest call counts; even, where the script has taken no share."""
    return bound() or TakenShare((1,) * found.plan.dp, found.replica)


def _counts(found: LoopRanks) -> bool:
    return _share(found).sizes[found.replica] > 0


def _factors(found: LoopRanks, *, by_samples: bool) -> tuple[list[float], float]:
    """What each replica's value counts, and the factor of this one's gradient."""
    share = _share(found)
    whole, mine = float(builtins.sum(share.sizes)), share.sizes[found.replica]
    if by_samples:
        return [size / whole for size in share.sizes], 1.0
    return [float(size > 0) for size in share.sizes], whole / mine if mine else 0.0


class _Reduced(torch.autograd.Function):
    """Replicas' values, added up in their order by what each counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: LoopRanks, by_samples: bool) -> Tensor:
        counted, ctx.factor = _factors(found, by_samples=by_samples)
        parts = all_gathered(found.own.statistics, x.reshape(1, -1))
        dtype = x.dtype if x.is_floating_point() or not by_samples else torch.get_default_dtype()
        total = torch.zeros_like(parts[0], dtype=dtype)
        for each, factor in zip(parts, counted, strict=True):
            if factor:
                total += each if factor == 1.0 else each * factor
        return total.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient if ctx.factor == 1.0 else gradient * ctx.factor, None, None


class _GatheredRows(torch.autograd.Function):
    """All replicas' rows. What every replica's loss says of a row is added up, by what the replica counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: LoopRanks) -> Tensor:
        ctx.found, ctx.share, ctx.rows = found, _share(found), len(x)
        group, rows = found.own.statistics, x if _counts(found) else x[:0]
        ctx.sizes = all_gathered(group, torch.tensor([[len(rows)]], device=x.device)).flatten().tolist()
        return joined_rows(rows.detach(), ctx.sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, mine = builtins.sum(ctx.share.sizes), ctx.share.sizes[ctx.found.replica]
        own = summed_rows(gradient * (mine / total), ctx.sizes, ctx.found.own.statistics)
        if not mine:
            return gradient.new_zeros((ctx.rows, *gradient.shape[1:])), None
        return own * (total / mine), None


def all_gathered(group: RecordedGroup, row: Tensor) -> Tensor:
    """The [1, n] of every replica as [replicas, n]."""
    sent = row.detach().contiguous().clone()
    everyone = sent.new_empty(group.size * sent.numel())
    group.all_gather(everyone, sent.view(-1)).wait()
    return everyone.view(group.size, -1)
