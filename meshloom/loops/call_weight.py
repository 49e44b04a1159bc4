"""What a part of a batch counts in a mean where the script says it (`parallel(weight=...)`): a replica's call among those of others, a microbatch in its
call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import TrainingError
from meshloom.loops.means import all_gathered
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import TakenShare, bind, counted_as

Weight = Callable[..., float | Tensor | None]  # of what a call gets


def said_of(weight: Weight, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """What the script's function says of these inputs; nan: no number. None: their rows count."""
    with torch.no_grad():
        found = weight(*args, **kwargs)
    try:
        return None if found is None else float(found)
    except (TypeError, ValueError, RuntimeError):  # of tensors of several elements
        return math.nan


def counts(said: Sequence[float | None], rows: Sequence[float], what: str) -> Sequence[float]:
    """What each part of a batch counts: what is said of it, or its rows, where nothing is said of any; a part without rows counts nothing. what: a part,
    in words. Raises `TrainingError` for what no mean can be taken by.

    >>> counts([5.0, 3.0], [2, 2], "replica"), counts([None, None], [2, 1], "replica")
    ([5.0, 3.0], [2, 1])
    """
    if all(each is None for each, size in zip(said, rows, strict=True) if size):
        return rows
    found = [each if size else 0.0 for each, size in zip(said, rows, strict=True)]
    for at, (each, size) in enumerate(zip(found, rows, strict=True)):
        if size and not 0 < (each or 0) < math.inf:
            raise TrainingError(
                f"The function of parallel(weight=...) gives {each} for {what} {at} of {len(said)}, and a mean counts each by a number above 0 (or all by rows: None). "
                "Where a part has nothing to count, take larger batches or fewer microbatches, or give ml.mean(total, count) as the loss."
            )
    return [each or 0.0 for each in found]


def counted(
    weight: Weight | None, found: LoopRanks, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """A context for the call with these inputs, which counts by its weight among those of other replicas. All of them call this."""
    if weight is None or found.plan.dp == 1:
        return nullcontext()
    share = bind((args, kwargs)) or TakenShare((1,) * found.plan.dp, found.replica)
    own = said_of(weight, args, kwargs) if share.sizes[found.replica] else None
    sent = [math.inf if own is None else own if math.isfinite(own) else math.nan]
    everyone = all_gathered(
        found.own.statistics, torch.tensor([sent], dtype=torch.float64, device=found.device)
    )
    said = [None if each == math.inf else each for each in everyone.flatten().tolist()]
    return counted_as(TakenShare(tuple(counts(said, share.sizes, "replica")), found.replica))
