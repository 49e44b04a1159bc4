"""Rehearsals whose times are known, for tests of prices: made by hand, nothing is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshloom.core.plan import Plan
from meshloom.machine.links import COLLECTIVES, Link
from meshloom.machine.machine import Machine, example_machine
from meshloom.pipeline.schedules.spans import Span
from meshloom.planner.memory.rank_memory import HeldBytes
from meshloom.planner.rehearsal.rehearsal import RankStep, Rehearsal, RehearsedCall

NOTHING = HeldBytes(parameters=0, gradients=0, optimizer=0, buffers=0, kept=0, trained=0)


def machine(*, latency: float = 0.0, bytes_per_second: float = 1e9, **values: Any) -> Machine:
    """Links of one latency and rate, and four cores."""
    links = tuple(
        Link(
            collective=each,
            ranks=ranks,
            latency_seconds=latency,
            bytes_per_second=bytes_per_second,
            residual=0.0,
        )
        for each in COLLECTIVES
        for ranks in (2, 3, 4)
    )
    return replace(example_machine(), **{"links": links, "transport": "shm", "cores": 4, **values})


def step(
    chunks: float,
    *,
    update: float = 0.0,
    before: float = 0.0,
    after: float = 0.0,
    calls: tuple[RehearsedCall, ...] = (),
    actions: Any = (),
) -> RankStep:
    """A rank computes chunks, something before its update, the update, something after it."""
    begins = chunks + before
    spans = (
        *actions,
        Span(kind="exchange", start=chunks, stop=begins),
        Span(kind="update", start=begins, stop=begins + update),
        Span(kind="exchange", start=begins + update, stop=begins + update + after),
    )
    return RankStep(seconds=begins + update + after, spans=spans, calls=calls)


def rehearsal(plan: str, steps: list[RankStep], **values: Any) -> Rehearsal:
    """One step of each rank."""
    parsed = Plan.parse(plan)
    places = tuple(parsed.mesh.place(rank) for rank in range(parsed.mesh.size))
    return Rehearsal(
        plan=parsed, threads=1, places=places, steps=(tuple(steps),), held=(NOTHING,) * len(steps), **values
    )
