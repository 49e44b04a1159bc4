"""Prices plans of one job: seconds, bytes and memory, from rehearsals here and measurements of the target
machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from meshloom.core.cache import Cache
from meshloom.core.errors import CaptureError, MachineError, PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.machine.machine import Machine
from meshloom.planner.amdahl import AmdahlWork, bound, with_communication
from meshloom.planner.fitting import predicted_ranks
from meshloom.planner.memory.fake_step import NeedsValuesError
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import Memory, predict_memory
from meshloom.planner.memory.rank_memory import HeldBytes, copied_by, window_bytes
from meshloom.planner.readings import Readings
from meshloom.planner.rehearsal.rehearsal import RankStep, Rehearsal
from meshloom.planner.rehearsal.rehearse import rehearse
from meshloom.planner.step_seconds import Places, StepPrice, price_step
from meshloom.program.cost.program_seconds import program_seconds
from meshloom.telemetry.timings import Timings


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices to run on.

    num_ranks: at most. machine: for which plans are priced, as calibrated. here: the machine that rehearses,
    if that is another one. threads_of: of each of so many ranks. hosts: over which they are spread, consecutive
    ranks on one. common_memory: whether ranks along dp are processes of one host that share memory. memory_bytes: what a rank may hold; 0: a GPU's memory, or its
    share of the host's. places: where the ranks along each axis are.
    """

    num_ranks: int
    machine: Machine
    threads_of: Callable[[int], int]
    common_memory: bool
    memory_bytes: int = 0
    here: Machine | None = None
    places: Places = field(default_factory=Places)
    hosts: int = 1

    @property
    def ranks_per_host(self) -> int:
        """At most."""
        return -(-self.num_ranks // self.hosts)

    def limit(self, num_ranks: int) -> int:
        """Bytes that each of so many ranks may hold."""
        sharing = 1 if self.machine.device == "cuda" else min(num_ranks, self.ranks_per_host)
        return self.memory_bytes or self.machine.memory_bytes // sharing


@dataclass(frozen=True, kw_only=True)
class Option:
    """A plan and its costs.

    memory_bytes: of the rank that holds most. num_bytes: axis -> bytes that rank 0 hands over in a step.
    measured_seconds: of a step, if the plan was tried. held: [rank], what it held in the rehearsal, without
    temporaries and the batch.
    """

    plan: Plan
    price: StepPrice
    memory_bytes: int
    limit_bytes: int
    num_bytes: Mapping[str, int]
    measured_seconds: float | None = None
    why: str = ""
    held: tuple[HeldBytes, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step: measured, or else predicted."""
        return self.price.seconds if self.measured_seconds is None else self.measured_seconds

    def times(self, other: Option) -> float:
        """How many times as long a step takes as one of `other`: measured if both were tried, else
        predicted."""
        tried = self.measured_seconds is not None and other.measured_seconds is not None
        return self.seconds / other.seconds if tried else self.price.seconds / other.price.seconds

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.memory_bytes <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Of n replicas against one rank with the same threads. bound: Amdahl's; with_communication: with the
    cost of communication; predicted: by price."""

    num_ranks: int
    bound: float
    with_communication: float
    predicted: float


class Pricer:
    """Prices plans of one job on some devices.

    one_device: memory of a step on one device: predicted from the program, or measured where the loss cannot
    be captured or the optimizer needs values. timings: as of `advise`. unread: why the loss cannot be captured; "": it can. cache: as
    for `advise`.
    """

    def __init__(
        self, job: Job, devices: Devices, cache: Cache | None = None, timings: Timings | None = None
    ) -> None:
        self._job, self._timings = job, timings
        self._devices = devices
        self._cache = cache
        self._readings = Readings(job, cache, timings)
        self.unread = ""
        try:
            self._readings.of(job.batch_size)
        except CaptureError as error:
            self.unread = str(error)
        predicted = self._predicted()
        self._is_predicted = predicted is not None
        self.one_device = predicted or measure_memory(job, first_batches(job, 1))
        self._speed = self._relative_speed()
        self._rehearsals: dict[tuple[str, int], Rehearsal] = {}  # by plan and threads

    def price(self, plan: Plan) -> Option:
        """Rehearses a plan and prices it. Raises `PlanError` or `CaptureError` if it cannot run the job."""
        if self.unread and plan.divides_loss:
            raise CaptureError(self.unread)
        rehearsal = self._rehearsed(plan, self._devices.threads_of(plan.mesh.size))
        return Option(
            plan=plan,
            price=self._price(rehearsal),
            memory_bytes=self._memory(rehearsal),
            limit_bytes=plan.memory_bytes or self._devices.limit(plan.mesh.size),
            num_bytes=rehearsal.num_bytes,
            held=rehearsal.held,
        )

    def speedups(self, options: Sequence[Option]) -> tuple[AmdahlWork | None, tuple[Speedup, ...]]:
        """Of data parallelism: what one rank does in a step, and for each number of replicas that was priced
        the bounds and the price."""
        replicas = {
            each.plan.dp: each.price
            for each in options
            if each.plan.mesh.size == each.plan.dp > 1 and not each.plan.zero
        }
        if not replicas:
            return None, ()
        alone = self._price(self._rehearsed(Plan(), self._devices.threads_of(max(replicas))))
        work = AmdahlWork(serial_seconds=alone.seconds - alone.chunks, parallel_seconds=alone.chunks)
        found = [
            Speedup(
                num_ranks=dp,
                bound=bound(work, dp),
                with_communication=with_communication(work, dp, price.exchange),
                predicted=work.seconds / price.seconds,
            )
            for dp, price in sorted(replicas.items())
        ]
        return work, tuple(found)

    def _price(self, rehearsal: Rehearsal) -> StepPrice:
        places = self._devices.places
        if self._devices.hosts > 1:
            places = replace(places, ranks_per_host=self._devices.ranks_per_host)
        price = price_step(rehearsal, self._devices.machine, places=places)
        return with_disk(price, self._disk_bytes(rehearsal) / self._devices.machine.disk_rate)

    def _disk_bytes(self, rehearsal: Rehearsal) -> int:
        """Of a step, what the ranks of a host read and write of offloaded state: all of it, as if none stayed in the page
        cache."""
        here = self._devices.ranks_per_host
        per_rank = [each.offloaded for each in rehearsal.held]
        return 2 * max(sum(per_rank[start : start + here]) for start in range(0, len(per_rank), here))

    def _rehearsed(self, plan: Plan, threads: int) -> Rehearsal:
        """Of a plan that offloads, the rehearsal without that, if there is memory for it: ranks here share one disk."""
        if plan.offload != "none":
            with suppress(PlanError):
                return offloaded(self._rehearsed(replace(plan, offload="none"), threads))
        if (known := self._rehearsals.get((str(plan), threads))) is not None:
            return known
        found = rehearse(
            self._job, plan, threads=threads, common_memory=self._devices.common_memory, optimizer_factor=self.one_device.optimizer_factor,
            cache=self._cache, timings=self._timings,
        )  # fmt: skip
        found = at_speed(found, self._speed) if self._speed != 1.0 else found
        self._rehearsals[str(plan), threads] = found
        return found

    def _memory(self, rehearsal: Rehearsal) -> int:
        """Bytes of the rank that holds most: predicted from the program, or where it cannot be, what was held in the rehearsal, the batch, and one
        device's temporaries for such a chunk."""
        plan = rehearsal.ran or rehearsal.plan
        if self._is_predicted:
            return max(
                each.peak for each in predicted_ranks(self._readings, plan, one_copy=rehearsal.one_copy)
            )
        temporaries = self.one_device.temporaries // (plan.num_chunks * plan.tp)
        state = max(each.offloaded for each in rehearsal.held)
        temporaries = max(temporaries, window_bytes(state, 0, self.one_device.optimizer_factor))
        copied = 0
        if self._job.checkpoint == "background" and not state and self._devices.machine.device == "cpu":
            copied = max(copied_by(each, plan, one_copy=rehearsal.one_copy) for each in rehearsal.held)
        held = max(each.total for each in rehearsal.held) + copied
        return held + temporaries + self.one_device.batch // plan.dp

    def _predicted(self) -> Memory | None:
        """Of one device, from shapes; None where the loss cannot be captured, or the optimizer cannot be stepped without values."""
        if self.unread:
            return None
        try:
            return predict_memory(
                self._readings.of(self._job.batch_size).program, self._job.optimizer, copies=self._job.checkpoint == "background"
            )  # fmt: skip
        except NeedsValuesError:  # then memory is measured
            return None

    def _relative_speed(self) -> float:
        """How many times longer computing takes on the machine in question than here."""
        here, there = self._devices.here, self._devices.machine
        if here is None or here.name == there.name:
            return 1.0
        if self.unread:
            raise MachineError(
                f"Plans are priced for {there.name} by what its operators take, and this loss cannot be read: {self.unread}"
            )
        read = self._readings.of(self._job.batch_size)
        there_seconds, here_seconds = (
            program_seconds(read.program, read.costs, machine).total for machine in (there, here)
        )
        return there_seconds / here_seconds


def offloaded(rehearsal: Rehearsal) -> Rehearsal:
    """The same steps with the optimizer's state on a disk."""
    plan = replace(rehearsal.plan, offload="optimizer")
    ran = rehearsal.ran and replace(rehearsal.ran, offload="optimizer")
    held = tuple(replace(each, optimizer=0, offloaded=each.optimizer) for each in rehearsal.held)
    return replace(rehearsal, plan=plan, ran=ran, held=held)


def with_disk(price: StepPrice, seconds: float) -> StepPrice:
    """A step whose update also reads and writes so long."""
    idle = (price.idle_share * price.seconds + seconds) / (price.seconds + seconds)
    return replace(
        price, seconds=price.seconds + seconds, update=price.update + seconds, disk=seconds, idle_share=idle
    )


def at_speed(rehearsal: Rehearsal, factor: float) -> Rehearsal:
    """The same steps by ranks that compute `factor` times as long."""

    def slower(step: RankStep) -> RankStep:
        spans = (replace(each, start=each.start * factor, stop=each.stop * factor) for each in step.spans)
        calls = (replace(each, at=each.at * factor) for each in step.calls)
        return RankStep(seconds=step.seconds * factor, spans=tuple(spans), calls=tuple(calls))

    return replace(rehearsal, steps=tuple(tuple(map(slower, step)) for step in rehearsal.steps))
