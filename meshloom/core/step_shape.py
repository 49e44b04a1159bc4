"""What is known of a step before it."""

from __future__ import annotations

from typing import NamedTuple


class StepShape(NamedTuple):
    """Of a step on one rank.

    chunks: that the rank computes, each from its forward to the end of its backward before the next; None:
        those of a pipeline, whose forwards and backwards are in another order. may_wait: whether a backward
        may wait for other replicas, as all of them compute in one order.
    """

    chunks: int | None = None
    may_wait: bool = True
