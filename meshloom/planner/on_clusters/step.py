"""The seconds and the memory of a plan's step on a cluster.

seconds   compute | tp | bubble | pp | dp, as far as no backward hides it | update
memory    parameters, gradients, optimizer state, buffers | activations in flight | what is there at one time | exchange
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from meshloom.clusters.cluster import Cluster
from meshloom.clusters.collective_seconds import collective_seconds, overlapped_seconds
from meshloom.core.plan import Plan
from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.timing import Durations, length_of
from meshloom.planner.on_clusters.part import StageWork

FEW_ROUNDS = 4  # of microbatches, so many for each stage along pp; from then on a schedule repeats itself
_UNIT_COPIES = 2  # of full units under zero=3: the one that computes and the next one
# of the ramps of 1f1b, what other schedules wait (Narayanan et al., 2021; Qi et al., 2024), where stages are equal
_RAMP = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 1 / 3, "zb-v": 0.0}


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of the model. state_factor: bytes of optimizer state for each byte of trained parameters. unit, rest: of a unit under zero=3, and of what is
    gathered once, as a share of all parameters. batch: bytes of a sample."""

    state_factor: float
    unit: float
    rest: float
    batch: int


@dataclass(frozen=True, kw_only=True)
class ClusterStep:
    """breakdown: seconds by part, which add up. memory: bytes by kind on the rank that holds most. sent: axis -> bytes that a rank
    hands over in a step. dp_seconds: of all communication along dp; hides: of computation beside which it can go. simulated: whether its schedule was
    executed on paper."""

    plan: Plan
    samples: int
    seconds: float
    breakdown: dict[str, float]
    memory: dict[str, int]
    sent: dict[str, int]
    dp_seconds: float
    hides: float
    simulated: bool

    @property
    def hidden(self) -> float:
        """Seconds of communication along dp that a step does not wait for."""
        return self.dp_seconds - self.breakdown["dp"]

    @property
    def peak(self) -> int:
        """Bytes of tensors at one time."""
        return sum(self.memory.values())


class Stageable(Protocol):
    """What can be cut into stages: a `ModelPart`."""

    def stages(self, count: int, samples: int, recompute: str) -> tuple[StageWork, ...]:
        """Of `count` stages."""
        ...


@dataclass(frozen=True, kw_only=True)
class _RankWork(StageWork):
    """Of all stages of a rank. over_pp: bytes that it hands over to other ranks for a microbatch."""

    over_pp: int


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A model cut for a pipeline. largest: (number, rank) of those of which none before holds as much of everything. message: bytes of the largest one."""

    stages: tuple[StageWork, ...]
    ranks: tuple[_RankWork, ...]
    slowest: _RankWork
    largest: tuple[tuple[int, _RankWork], ...]
    message: int
    seconds: float

    @property
    def per_rank(self) -> int:
        return len(self.stages) // len(self.ranks)


class StepPricer:
    """Of plans on one cluster."""

    def __init__(self, cluster: Cluster, totals: Totals) -> None:
        self._cluster, self._totals = cluster, totals
        self._collective: dict[tuple[str, int, int, int], float] = {}
        self._cuts: dict[Any, _Cut] = {}

    def on(self, cluster: Cluster) -> StepPricer:
        """Of plans on as many hosts of the same kind as that has, where models are cut alike."""
        other = StepPricer(cluster, self._totals)
        other._cuts = self._cuts
        return other

    def step(self, plan: Plan, part: Stageable, samples: int, *, simulated: bool = False) -> ClusterStep:
        """samples: of a microbatch. Raises `PlanError` where the model cannot be cut into so many stages."""
        cut = self._cut(plan, part, samples)
        slowest, m = cut.slowest, plan.microbatches
        compute, over_tp = m * (slowest.seconds - slowest.tp), m * slowest.tp
        message = self.seconds_of("send", cut.message, 2, plan.dp * plan.tp) if plan.pp > 1 else 0.0
        bubble, messages = 0.0, 2 * message * (len(cut.stages) - 1)
        if plan.pp > 1 and simulated:
            bubble, messages = max(0.0, self._length(plan, cut.stages, message) - compute - over_tp), 0.0
        elif plan.pp > 1:
            bubble = (cut.seconds - slowest.seconds) * _ramp(plan)
        last = min(each.backward for each in cut.ranks)  # of the rank whose gradients are late
        covered = {3: m * slowest.seconds, 2: m * last}.get(plan.zero, last)
        over_dp, hides = max((self._over_dp(plan, each) for _, each in cut.largest), key=sum)
        exposed = (
            overlapped_seconds(self._cluster.device, covered, hides) - covered if plan.overlap else hides
        )
        breakdown = {
            "compute": compute, "tp": over_tp, "bubble": bubble, "pp": messages, "dp": over_dp + exposed,
            "update": max(self._update(plan, each) for _, each in cut.largest),
        }  # fmt: skip
        memory = max(
            (self._memory(plan, cut, rank, each, samples) for rank, each in cut.largest), key=lambda found: sum(found.values())
        )  # fmt: skip
        sent = {
            "tp": m * slowest.tp_bytes, "pp": m * max(each.over_pp for each in cut.ranks),
            "dp": max(self._dp_bytes(plan, each) for _, each in cut.largest),
        }  # fmt: skip
        return ClusterStep(
            plan=plan, samples=samples, seconds=sum(breakdown.values()), breakdown=breakdown, memory=memory, sent={axis: each for axis, each in sent.items() if each},
            dp_seconds=over_dp + hides, hides=covered, simulated=simulated or plan.pp == 1,
        )  # fmt: skip

    def _cut(self, plan: Plan, part: Stageable, samples: int) -> _Cut:
        count = plan.num_stages if plan.pp > 1 else 1
        key = part, plan.pp, count, plan.schedule == "zb-v", samples, plan.recompute
        if key not in self._cuts:
            stages = part.stages(count, samples, plan.recompute)
            back = [0, *(each.returned for each in stages[:-1])]
            numbers = [range(rank, count, plan.pp) for rank in range(plan.pp)]
            if plan.schedule == "zb-v" and plan.pp > 1:
                numbers = [(rank, count - 1 - rank) for rank in range(plan.pp)]
            ranks = tuple(
                _rank_work([stages[number] for number in own], [back[number] for number in own])
                for own in numbers
            )
            self._cuts[key] = _Cut(
                stages=stages, ranks=ranks, slowest=max(ranks, key=lambda each: each.seconds), largest=tuple(_largest(ranks)),
                message=max(max(each.sent, each.returned) for each in stages), seconds=sum(each.seconds for each in ranks),
            )  # fmt: skip
        return self._cuts[key]

    def seconds_of(self, collective: Any, num_bytes: int, ranks: int, stride: int) -> float:
        """Of one among `ranks` ranks, `stride` apart."""
        key = (collective, num_bytes, ranks, stride)
        if ranks < 2 or not num_bytes:
            return 0.0
        if key not in self._collective:
            self._collective[key] = collective_seconds(
                self._cluster, collective, num_bytes, range(0, ranks * stride, stride)
            )
        return self._collective[key]

    def _length(self, plan: Plan, stages: Sequence[StageWork], message: float) -> float:
        """Of the chunks of a step, on paper: of so many microbatches that more of them take as long each."""
        p, v, m = plan.pp, len(stages) // plan.pp, plan.microbatches
        few = min(m, FEW_ROUNDS * p)
        durations = _durations(stages, message)

        def length(count: int) -> float:
            schedule = make_schedule(plan.schedule, p, count, v, durations)
            return length_of(schedule, durations)

        if few + p > m:
            return length(m)
        one, two = length(few), length(few + p)
        return one + (two - one) / p * (m - few)

    def _update(self, plan: Plan, rank: _RankWork) -> float:
        """Parameters, gradients and state are read, parameters and state are written."""
        trained = rank.trained / (plan.dp if plan.zero else 1)
        moved = trained * (3 + 2 * self._totals.state_factor)
        device = self._cluster.device
        return moved / (device.memory_bytes_per_second * device.memory_efficiency)

    def _over_dp(self, plan: Plan, rank: _RankWork) -> tuple[float, float]:
        """Seconds along dp: what nothing hides, and what computation can hide. The last bucket of gradients waits for the last backward."""
        if plan.dp == 1:
            return 0.0, 0.0
        gradients, m = rank.trained, plan.microbatches

        def seconds(
            collective: Literal["all_reduce", "all_gather", "reduce_scatter"], num_bytes: int
        ) -> float:
            return self.seconds_of(collective, num_bytes, plan.dp, plan.tp)

        bucket = min(gradients, plan.bucket_bytes)
        if plan.zero == 0:
            all_of_it, last = seconds("all_reduce", gradients), seconds("all_reduce", bucket)
            return last, max(0.0, all_of_it - last)
        scattered, last = seconds("reduce_scatter", gradients), seconds("reduce_scatter", bucket)
        if plan.zero == 3:
            gathered = seconds("all_gather", rank.parameters)
            first = gathered * self._totals.unit
            return last + first, m * (2 * gathered + scattered) - last - first
        times = m if plan.zero == 2 else 1
        return last + seconds("all_gather", gradients), max(0.0, times * scattered - last)

    def _dp_bytes(self, plan: Plan, rank: _RankWork) -> int:
        if plan.dp == 1:
            return 0
        trained, held, m = rank.trained, rank.parameters, plan.microbatches
        if plan.zero == 3:
            rest = round(self._totals.rest * held)
            return -(-(rest + 2 * m * (held - rest)) // plan.dp) + m * trained
        return trained * (m if plan.zero == 2 else 1) + (-(-trained // plan.dp) if plan.zero else 0)

    def _memory(self, plan: Plan, cut: _Cut, number: int, rank: _RankWork, samples: int) -> dict[str, int]:
        parameters, trained, kept = rank.parameters, rank.trained, rank.kept
        slices = plan.dp if plan.zero else 1
        if plan.pp > 1:
            chunks = chunks_in_flight(plan.schedule, plan.pp, number, plan.microbatches, cut.per_rank)
            kept = round(chunks * kept / cut.per_rank)
        exchange = {1: trained, 2: min(trained, 2 * plan.bucket_bytes)}.get(plan.zero, 0)
        if plan.zero == 3 and plan.dp > 1:
            exchange = 2 * _UNIT_COPIES * round(self._totals.unit * parameters)
        return {
            "parameters": -(-parameters // slices) if plan.zero == 3 else parameters,
            "gradients": -(-trained // slices),
            "optimizer": round(self._totals.state_factor * trained) // slices,
            "buffers": rank.buffers,
            "batch": self._totals.batch * samples,
            "kept": kept,
            "temporaries": rank.again,
            "exchange": exchange,
        }  # fmt: skip


def _rank_work(stages: Sequence[StageWork], back: Sequence[int]) -> _RankWork:
    """back: bytes of gradients that go back from each of its stages."""

    totals: dict[str, Any] = {
        each.name: sum(getattr(one, each.name) for one in stages) for each in fields(StageWork)
    }
    totals["again"] = max(each.again for each in stages)
    return _RankWork(over_pp=totals["sent"] + sum(back), **totals)


def _largest(ranks: Sequence[_RankWork]) -> Iterator[tuple[int, _RankWork]]:
    """Later ranks have fewer microbatches in flight."""
    found: list[_RankWork] = []
    for number, rank in enumerate(ranks):
        sizes = _sizes(rank)
        if not any(
            all(one >= other for one, other in zip(_sizes(each), sizes, strict=True)) for each in found
        ):
            found.append(rank)
            yield number, rank


def _sizes(rank: _RankWork) -> tuple[int, ...]:
    return rank.parameters, rank.trained, rank.buffers, rank.kept, rank.again


def _ramp(plan: Plan) -> float:
    """Of the seconds of the other ranks' microbatch, the share that a rank waits; with few microbatches there is nothing to fill it."""
    least = 1 / (plan.num_stages // plan.pp) if plan.schedule == "interleaved" else _RAMP[plan.schedule]
    few = max(0.0, 1 - (plan.microbatches - 1) / (plan.pp - 1))
    return least + (1 - least) * few


def executed_actions(plan: Plan) -> int:
    """Forwards and backwards that pricing its schedule executes on paper; halves of backwards are tried in some orders."""
    m, few = plan.microbatches, FEW_ROUNDS * plan.pp
    tried = 8 if SCHEDULES[plan.schedule].split else 1
    return 2 * tried * plan.num_stages * (m if few + plan.pp > m else 2 * few + plan.pp)


def stages_per_rank(schedule: str) -> Sequence[int]:
    """Numbers of stages on a rank that are tried."""
    entry = SCHEDULES[schedule]
    return (2, 4, 8) if entry.any_number else (entry.stages_per_rank,)


def _durations(stages: Sequence[StageWork], message: float) -> Durations:
    halves = [each.backward / 2 for each in stages]
    return Durations(
        forward=[each.forward for each in stages],
        input_gradient=halves,
        weight_gradient=halves,
        transfer=message,
    )


def chunks_in_flight(schedule: str, pp: int, rank: int, microbatches: int, per_rank: int) -> int:
    """Forwards of a rank's stages whose backwards are to come, at most (Narayanan et al., 2021, section 2.2). Halves of backwards take the memory of
    1f1b (Qi et al., 2024)."""
    if schedule == "gpipe":
        return microbatches * per_rank
    if SCHEDULES[schedule].split:
        return min(pp, microbatches) * per_rank
    if per_rank == 1:
        return min(pp - rank, microbatches)
    return min(2 * (pp - rank - 1) + (per_rank - 1) * pp + 1, microbatches * per_rank)
