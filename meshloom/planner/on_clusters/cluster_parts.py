"""The parts of a job's model on a cluster, one for each size of tp, made when they are first asked for."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any

from meshloom.clusters.cluster import Cluster
from meshloom.clusters.collective_seconds import collective_seconds
from meshloom.clusters.operator_seconds import operator_seconds
from meshloom.clusters.work import Sent
from meshloom.core.cache import Cache
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.plan import Plan
from meshloom.optimizer.bfloat16.lowered import lowered
from meshloom.planner.memory.fake_step import FakeStep, NeedsValuesError
from meshloom.planner.memory.unit_bytes import unit_bytes
from meshloom.planner.on_clusters.part import ModelPart, RecordedPart, recorded
from meshloom.planner.on_clusters.rank_records import Did
from meshloom.planner.on_clusters.step import StepPricer, Totals
from meshloom.planner.readings import Readings
from meshloom.program.cost.rates import Rates
from meshloom.telemetry.timings import Timings
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import rules_with
from meshloom.tensor_parallel.search.choose import choice_in, choice_resized, choose

# that microbatches are recorded with: of few, whether they can be divided depends on their number
SAMPLES = (8, 16)


class ClusterParts:
    """precision: as of a plan. compiled: whether they run as compiled code."""

    def __init__(
        self, job: Job, cluster: Cluster, *, precision: str = "float32", compiled: bool = False, cache: Cache | None = None, timings: Timings | None = None,
    ) -> None:  # fmt: skip
        plan = Plan(precision=precision)
        self._readings = Readings(lowered(in_precision(job, plan), plan), cache, timings)
        self._cluster, self._compiled = cluster, compiled
        self._seconds: dict[Did, float] = {}
        self._parts: dict[int, ModelPart] = {}
        self._recorded: dict[int, RecordedPart | PlanError] = {}

    def of(self, tp: int) -> ModelPart:
        """Raises `CaptureError` where the loss cannot be captured, and `PlanError` where it cannot be divided."""
        if tp not in self._parts:
            self._parts[tp] = ModelPart(self._record(tp), lambda did: self._priced(did, tp), self._rates(tp))
        return self._parts[tp]

    def priced_on(self, cluster: Cluster) -> ClusterParts:
        """The same, as another cluster takes it; where parameters are, the first one has decided."""
        other = copy(self)
        other._cluster, other._seconds, other._parts = cluster, {}, {}
        return other

    def _record(self, tp: int) -> RecordedPart:
        if tp not in self._recorded:
            try:
                self._recorded[tp] = self._made(tp)
            except PlanError as error:
                self._recorded[tp] = error
        found = self._recorded[tp]
        if isinstance(found, PlanError):
            raise found
        return found

    @property
    def pricer(self) -> StepPricer:
        """Of plans."""
        return StepPricer(self._cluster, self._totals)

    @cached_property
    def _totals(self) -> Totals:
        program, job = self._readings.of(SAMPLES[0]).program, self._readings.job
        try:
            step = FakeStep(program, job.optimizer)
        except NeedsValuesError:
            step = FakeStep(program, None)
        trained = sum(step.trainable_bytes)
        units = unit_bytes(
            {name: each.meta for name, each in program.parameters.items()}, Plan().bucket_bytes
        )
        return Totals(
            state_factor=step.optimizer_bytes / trained if trained else 0.0,
            unit=(units.full - units.rest) / 2 / units.parameters if units.parameters else 0.0,
            rest=units.rest / units.parameters if units.parameters else 0.0,
            batch=sum(each.meta.num_bytes for each in program.inputs) // SAMPLES[0],
        )

    def _made(self, tp: int) -> RecordedPart:
        readings = [self._readings.of(samples) for samples in SAMPLES]
        programs = [each.program for each in readings]
        if tp > 1:
            one, two = (layout_of(each, rules_with(self._readings.job.rules)) for each in programs)
            choice = choose(one, tp, self._rates(tp), priced=readings[0].costs)
            divided = partition(choice)
            known = choice_in(one, choice, held=divided.held)
            again = choice_resized(two, known, held=divided.held) if known is not None else None
            if again is None:
                raise PlanError(
                    f"Microbatches of {SAMPLES[0]} and {SAMPLES[1]} samples cannot be divided alike over tp={tp}."
                )
            programs = [divided.of(0).program, partition(again).of(0).program]
        return recorded(programs, SAMPLES, tp, compiled=self._compiled)

    def _priced(self, did: Did, tp: int) -> float:
        if isinstance(did, Sent):
            return did.times * collective_seconds(self._cluster, did.collective, did.num_bytes, range(tp))
        if did not in self._seconds:
            self._seconds[did] = operator_seconds(self._cluster.device, did, self._compiled)
        return self._seconds[did]

    def _rates(self, tp: int) -> Rates:
        """By which placements are chosen: those of products in the middle of the range, and of collectives of some megabytes."""
        device, size = self._cluster.device, 2**24
        dtype: Any = "bfloat16" if "bfloat16" in device.peak_flops else "float32"
        seconds = collective_seconds(self._cluster, "all_gather", size, range(max(tp, 2)))
        start = collective_seconds(self._cluster, "all_gather", 1, range(max(tp, 2)))
        n = max(tp, 2)
        return Rates(
            flops_per_second=device.peak_flops[dtype] * device.product_efficiency,
            bytes_per_second=device.memory_bytes_per_second * device.memory_efficiency,
            start_seconds=start, latency_seconds=0.0, link_bytes_per_second=(n - 1) / n * size / max(seconds - start, 1e-9),
            source=f"{self._cluster.name}, as its file says",
        )  # fmt: skip
