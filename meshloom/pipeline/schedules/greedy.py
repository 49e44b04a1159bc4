"""Greedy list scheduling: whenever a rank is free, it runs the most urgent action that is ready."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.timing import Durations

Forwards = Literal["deep", "in groups"]


def build_greedily(
    name: str,
    ranks: tuple[int, ...],
    num_microbatches: int,
    *,
    limits: Sequence[int],
    durations: Durations,
    split: bool,
    urgent: str,
    forwards: Forwards,
) -> Schedule | None:
    """The greedy schedule; None if it deadlocks under its limits.

    limits: [rank], the most activations (of one stage and microbatch) held at a time, until their backward
        ends.
    split: backward in two halves. urgent: kinds, most urgent first, like IFW.
    forwards: prefers the one nearest to the loss, or microbatches in groups of as many as there are ranks.
    """
    run = _Run(ranks, num_microbatches, limits, durations, split=split, urgent=urgent, forwards=forwards)
    if not run.to_the_end():
        return None
    return Schedule(
        name=name, ranks=ranks, num_microbatches=num_microbatches, actions=tuple(map(tuple, run.rows))
    )


class _Run:
    def __init__(
        self,
        ranks: tuple[int, ...],
        m: int,
        limits: Sequence[int],
        durations: Durations,
        *,
        split: bool,
        urgent: str,
        forwards: Forwards,
    ) -> None:
        self.rows: list[list[Action]] = [[] for _ in limits]
        self._ranks, self._limits, self._durations = ranks, limits, durations
        self._split, self._urgent, self._forwards = split, urgent, forwards
        self._left = (3 if split else 2) * len(ranks) * m
        # [rank] ready action -> since when.
        self._ready: list[dict[Action, float]] = [{} for _ in limits]
        self._ready[ranks[0]] = {Action(0, "F", number): 0.0 for number in range(m)}
        self._free_at = [0.0] * len(limits)
        self._held = [0] * len(limits)
        self._later = [
            sum(1 for after in range(stage + 1, len(ranks)) if ranks[after] == rank)
            for stage, rank in enumerate(ranks)
        ]

    def to_the_end(self) -> bool:
        times = [0.0]
        while self._left and times:
            now = heapq.heappop(times)
            while times and times[0] == now:
                heapq.heappop(times)
            for rank in range(len(self.rows)):
                if self._free_at[rank] <= now and (action := self._best(rank, now)):
                    self._free_at[rank] = now + self._durations.of(action)
                    self._run(rank, action, self._free_at[rank])
                    heapq.heappush(times, self._free_at[rank])
                    heapq.heappush(times, self._free_at[rank] + self._durations.transfer_of(action))
        return not self._left

    def _best(self, rank: int, now: float) -> Action | None:
        room = self._limits[rank] - self._held[rank]
        # One slot is reserved for every later stage of this rank: a microbatch that has started must reach
        # the loss, or its gradients never return.
        possible = [
            each for each, since in self._ready[rank].items() if since <= now and (each.kind != "F" or room > self._later[each.stage])
        ]  # fmt: skip
        return min(possible, key=self._urgency, default=None)

    def _urgency(self, action: Action) -> tuple[int, ...]:
        kind = self._urgent.index(action.kind)
        if action.kind != "F":
            return kind, action.stage, action.microbatch
        if self._forwards == "deep":
            return kind, -action.stage, action.microbatch
        return kind, action.microbatch // len(self.rows), action.stage, action.microbatch

    def _run(self, rank: int, action: Action, done: float) -> None:
        """Records which actions become ready after this one."""
        stage, number = action.stage, action.microbatch
        back = "I" if self._split else "B"
        self._left -= 1
        del self._ready[rank][action]
        self.rows[rank].append(action)
        if action.kind == "F":
            self._held[rank] += 1
            last = stage + 1 == len(self._ranks)
            after = Action(stage, back, number) if last else Action(stage + 1, "F", number)
            self._add(after, action, rank, done)
        elif action.kind in ("I", "B") and stage:
            self._add(Action(stage - 1, back, number), action, rank, done)
        if action.kind == "I":
            self._ready[rank][Action(stage, "W", number)] = done
        if action.kind in ("W", "B"):
            self._held[rank] -= 1

    def _add(self, action: Action, before: Action, rank: int, done: float) -> None:
        to = self._ranks[action.stage]
        self._ready[to][action] = done + (self._durations.transfer_of(before) if to != rank else 0.0)
