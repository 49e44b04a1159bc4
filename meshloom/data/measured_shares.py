"""Every few steps: the ranks put together how fast they were, rank 0 decides, and all note the shares that
come of it."""

from __future__ import annotations

from meshloom.comm.objects import collect, share
from meshloom.comm.seat import Seat
from meshloom.comm.steps import Steps
from meshloom.data.pace import Pace
from meshloom.data.proportion import propose
from meshloom.data.shares import Shares


def remeasure(seat: Seat, pace: Pace, shares: Shares, batch_size: int, stop_step: int) -> Steps[str]:
    """Change `shares` if that pays, from the first step that no reader has asked for; what to tell the user,
    "" if nothing. Every rank calls it.

    A replica is as slow as the slowest of its ranks. batch_size: of a full batch. stop_step: where the run
    ends.
    """
    everyone: list[tuple[int, float | None, int]] = yield from collect(
        seat.world, [seat.place.dp, pace.median(), shares.first_free]
    )
    first_free = max(free for _, _, free in everyone)
    mine = (
        _decide(everyone, shares.sizes(first_free - 1, batch_size), first_free)
        if seat.rank == 0 and first_free < stop_step
        else None
    )
    decided: tuple[list[int], str] | None = yield from share(seat.world, mine)
    if decided is None:
        return ""
    sizes, text = decided
    shares.change(first_free, sizes)
    pace.forget()
    return text


def _decide(
    everyone: list[tuple[int, float | None, int]], sizes: list[int], step: int
) -> tuple[tuple[int, ...], str] | None:
    seconds = [0.0] * len(sizes)
    for replica, median, _ in everyone:
        if median is None:
            return None
        seconds[replica] = max(seconds[replica], median)
    proposal = propose(sizes, seconds)
    return (
        (proposal.sizes, f"shares {'+'.join(map(str, proposal.sizes))} from step {step}: {proposal.reason}")
        if proposal
        else None
    )
