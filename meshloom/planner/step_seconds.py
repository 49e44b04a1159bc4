"""The price of a plan's step: what its ranks computed in the rehearsal, slower where they share cores, and the cost of
communication.

    chunks                          exchange            update       exchange
    ranks compute; with pp the      gradients,          owners       updated parameters,
    simulated schedule              unless hidden       update       if other ranks need them

Between these parts all ranks wait for each other, so each takes as long as its slowest rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from meshloom.core.errors import MachineError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.mesh import AXES, Axis
from meshloom.machine.links import COLLECTIVES, Collective, Where
from meshloom.machine.machine import Machine, collective_seconds
from meshloom.planner.rehearsal.actions import pipelined
from meshloom.planner.rehearsal.rehearsal import RankStep, Rehearsal, RehearsedCall
from meshloom.planner.shared_cores import Effort, run_on_cores

# collectives that are not measured, as similar ones that are
_LIKE: Mapping[str, Collective] = {"barrier": "all_reduce"}


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """The seconds of a step, and of its parts, for the slowest rank in each part.

    chunks: forwards and backwards, with communication along tp and messages along pp. exchange: along dp, as
    far as it is not hidden by computation. update: of parameters. other: other computation in the step:
    buckets, sums, norms. communication: along tp and pp, of one rank, within `chunks`. idle_share: of
    the step in which a rank computes nothing, on average. disk: reading and writing offloaded state, within `update`.
    """

    seconds: float
    chunks: float
    exchange: float
    update: float
    other: float
    communication: Mapping[Axis, float]
    idle_share: float
    disk: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the ranks along each axis are: inside one host, or on several. ranks_per_host: so many consecutive ranks are
    on a host each, which says where those of a call are, whatever their axis; 0: not known."""

    dp: Where = "inside"
    pp: Where = "inside"
    tp: Where = "inside"
    ranks_per_host: int = 0

    def of(self, call: RehearsedCall) -> Where:
        """Where the ranks are that take part in a call."""
        if self.ranks_per_host and call.members:
            hosts = {rank // self.ranks_per_host for rank in call.members}
            return "inside" if len(hosts) == 1 else "between"
        return getattr(self, call.axis)


def price_step(rehearsal: Rehearsal, machine: Machine, *, places: Places | None = None) -> StepPrice:
    """The price of the median of the rehearsed steps, or of the mean over a round of local steps.

    Raises `MachineError` if the machine was calibrated with one rank.
    """
    pricer = _Pricer(rehearsal, machine, places or Places())
    prices = [pricer.price(step) for step in rehearsal.steps]
    if EXCHANGES[rehearsal.plan.exchange].independent:
        return _mean(prices)
    return sorted(prices, key=lambda each: each.seconds)[(len(prices) - 1) // 2]


class _Pricer:
    """Of one rehearsal on one machine."""

    def __init__(self, rehearsal: Rehearsal, machine: Machine, places: Places) -> None:
        self._rehearsal = rehearsal
        self._plan = rehearsal.plan
        self._machine = machine
        self._places = places
        self._size = rehearsal.plan.mesh.size

    def price(self, step: Sequence[RankStep]) -> StepPrice:
        """The price of one step of all ranks."""
        parts = [_Parts(each) for each in step]
        communication: dict[Axis, float] = {}
        for axis in ("tp", "pp"):
            within = max(
                sum(self._seconds(call) for call in each.calls if call.axis == axis) for each in step
            )
            if within:
                communication[axis] = within
        chunks, busy = self._chunks(step, parts)
        exchange = max(map(self._exchange, parts))
        phases = [(part.update, part.before_update, part.after_update) for part in parts]
        computing = list(zip(*phases, strict=True))
        update, *others = took = [self._together(each) for each in computing]
        busy += sum(seconds * _evenness(each) for seconds, each in zip(took, computing, strict=True))
        update += max(sum(map(self._seconds, part.calls_in_update)) for part in parts)
        seconds = chunks + exchange + update + sum(others)
        return StepPrice(
            seconds=seconds, chunks=chunks, exchange=exchange, update=update, other=sum(others), communication=MappingProxyType(communication),
            idle_share=max(0.0, 1.0 - busy / seconds),
        )  # fmt: skip

    def _chunks(self, step: Sequence[RankStep], parts: Sequence[_Parts]) -> tuple[float, float]:
        """Seconds, and those in which a rank computes, on average."""
        within = [[call for call in part.calls_in_chunks if call.axis != "dp"] for part in parts]
        if self._rehearsal.schedule is None:
            computing = self._together([part.chunks for part in parts])
            busy = computing * _evenness([part.chunks for part in parts])
            return computing + max(sum(map(self._seconds, calls)) for calls in within), busy
        schedule, others = self._rehearsal.schedule, self._size // self._plan.pp
        ranks = [
            pipelined(own, calls, part.chunks, self._seconds)
            for own, part, calls in zip(step, parts, within, strict=True)
        ]
        # The slowest replica, and the slowest rank along tp, counts.
        took = {
            action: [rank.actions[action] for rank in ranks if action in rank.actions]
            for _, action in schedule
        }
        shared = run_on_cores(
            schedule,
            lambda action: Effort(
                alone_seconds=max(each.alone for each in took[action]),
                communication_seconds=max(each.communication for each in took[action]),
            ),
            lambda before, _: max(each.sending for each in took[before]),
            lambda busy: self._slow(busy * others),
        )
        around, rest = self._together([rank.around for rank in ranks]), max(rank.rest for rank in ranks)
        return shared.seconds + around + rest, statistics.mean(shared.busy_seconds)

    def _exchange(self, part: _Parts) -> float:
        """Seconds to wait after a rank has computed its chunks, and of what follows.

        Where a device other than the cores moves the bytes, it does so while chunks are computed.
        """
        before = [call for call in part.calls_in_chunks if call.axis == "dp"]
        after = sum(self._seconds(call) for call in part.calls_in_exchange)
        on_cores = [
            call for call in before if self._machine.device == "cpu" and self._places.of(call) == "inside"
        ]
        after += sum(map(self._seconds, on_cores))
        slow = self._slow(self._size)
        done = 0.0
        for call in (each for each in before if each not in on_cores):
            done = max(done, call.at * slow) + self._seconds(call)
        return max(0.0, done - part.chunks * slow) + after

    def _seconds(self, call: RehearsedCall) -> float:
        if call.kind == "recv":
            return 0.0
        collective = _collective(call.kind)
        place = self._places.of(call)
        return collective_seconds(
            self._machine, collective, call.num_bytes, 2 if collective == "send" else call.ranks, among=self._size, place=place, in_place=call.in_place
        )  # fmt: skip

    def _together(self, seconds: Sequence[float]) -> float:
        """Seconds of ranks that compute so long each, at the same time."""
        longest = max(seconds)
        return longest * self._slow(sum(seconds) / longest) if longest > 0 else 0.0

    def _slow(self, busy: float) -> float:
        """busy: ranks that compute at the same time, of all hosts."""
        here = self._places.ranks_per_host
        busy *= min(1.0, here / self._size) if here else 1.0
        return self._machine.slowdown(busy, self._rehearsal.threads)


class _Parts:
    """A rank's step, split at its exchange and its update. All in seconds of its own clock."""

    def __init__(self, step: RankStep) -> None:
        exchange = [span for span in step.spans if span.kind == "exchange"]
        updates = [span for span in step.spans if span.kind == "update"]
        if not exchange or not updates:
            raise MachineError("A rehearsed step has no exchange or no update, so it cannot be priced.")
        first, update = exchange[0], updates[0]
        self.chunks = first.start
        self.before_update = update.start - first.start
        self.update = update.seconds
        self.after_update = step.seconds - update.stop
        self.calls_in_chunks = [call for call in step.calls if call.at <= first.start]
        self.calls_in_update = [call for call in step.calls if update.start < call.at <= update.stop]
        self.calls_in_exchange = [
            call for call in step.calls if first.start < call.at <= update.start or call.at > update.stop
        ]


def _evenness(seconds: Sequence[float]) -> float:
    """The mean over the maximum: the average share of the slowest rank's time in which ranks compute."""
    longest = max(seconds)
    return statistics.mean(seconds) / longest if longest else 0.0


def _collective(kind: str) -> Collective:
    for each in COLLECTIVES:
        if each == kind:
            return each
    return _LIKE[kind]


def _mean(prices: Sequence[StepPrice]) -> StepPrice:
    communication: dict[Axis, float] = {
        axis: statistics.mean(each.communication.get(axis, 0.0) for each in prices) for axis in AXES
    }
    numbers = ("seconds", "chunks", "exchange", "update", "other")
    means = {name: statistics.mean(getattr(each, name) for each in prices) for name in numbers}
    idle = statistics.mean(each.idle_share for each in prices)
    return StepPrice(communication=MappingProxyType(communication), idle_share=idle, **means)
