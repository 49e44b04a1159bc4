"""Cuts a job's programs into stages: one rank decides by the operators' costs, all others follow, and
parameters stay in their stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshloom.comm.group import Group
from meshloom.comm.objects import on_rank_0, share
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.schedules.timing import Durations
from meshloom.pipeline.stages.choose_cuts import CutChoice
from meshloom.pipeline.stages.duplicated_nodes import (
    duplicate_reshards,
    restore_routed_rows,
    split_fused_layers,
)
from meshloom.pipeline.stages.plan_cuts import (
    StageTimes,
    choose_stages,
    schedule_of,
    stage_times,
    stored_cuts,
)
from meshloom.pipeline.stages.stages import Stage, cut_into_stages, users_of
from meshloom.program.cost.cost import Cost, costs
from meshloom.program.cost.rates import Rates, rates_here
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.experts import place_rows, rows_here, take_rows
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.program.recompute.recompute import kept_values
from meshloom.program.sizes.alike import alike
from meshloom.program.store.program_cache import ProgramCache
from meshloom.program.store.stored_costs import cached_saved_values
from meshloom.telemetry.timings import Timings
from meshloom.tensor_parallel.partition import RoutedRows


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """The decisions for a program, also at other sizes. stage_of: of each node. kept: as in `Program`. pinned: as for
    `computed_from_batch`."""

    program: Program
    stage_of: Mapping[str, int]
    kept: frozenset[str] | None
    pinned: frozenset[str]


class StageCutter:
    """Cuts the programs of `job` under `plan`. rates: to decide by; default: of the deciding rank's machine.

    choice, first: of the first program, which determines parameters' stages; `choice` only where it was made.
    """

    def __init__(
        self, job: Job, plan: Plan, *, rates: Rates | None, timings: Timings, stored: ProgramCache | None
    ) -> None:
        self.choice: CutChoice | None = None
        self.first: tuple[Stage, ...] = ()
        self.rates = rates
        self._job, self._plan, self._timings, self._stored = job, plan, timings, stored
        self._users: dict[str, tuple[int, ...]] | None = None  # parameter or buffer -> the stages that use it
        self._decided: list[_Decided] = []  # of programs that differ in more than sizes
        self._times: StageTimes | None = None  # by which the schedule is searched, if it is
        self._schedules: dict[int, Schedule] = {}  # by number of microbatches

    @property
    def ranks(self) -> tuple[int, ...]:
        """Stage -> its rank along pp."""
        return self.schedule(1).ranks

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> ranks along pp that use it: the one that updates it, then by stage."""
        assert self._users is not None, "cut() comes first"
        return {
            name: tuple(dict.fromkeys(self.ranks[stage] for stage in stages))
            for name, stages in self._users.items()
        }

    @property
    def sizes(self) -> list[int]:
        """Samples of each microbatch in a full batch, of the replica with the largest share."""
        return self._plan.largest_share(self._job.batch_size)

    def schedule(self, num_microbatches: int) -> Schedule:
        """The plan's schedule for `num_microbatches`."""
        if num_microbatches not in self._schedules:  # greedy schedules take a while to build
            self._schedules[num_microbatches] = schedule_of(self._plan, num_microbatches, self._times)
        return self._schedules[num_microbatches]

    def has_cut(self, program: Program) -> bool:
        """Whether it has decided for this program at other sizes."""
        return self._for_other_sizes(program) is not None

    def cut(
        self,
        full: Program,
        part: Program,
        routed: Mapping[str, RoutedRows],
        group: Group,
        priced_program: Program | None = None,
    ) -> tuple[Stage, ...]:
        """The stages of `part`, this rank's shard of `full` along tp. All ranks of `group` call this.

        routed: values of the shard with rows that data routes to this rank.
        priced_program: a program with the same nodes whose costs decide; default: `full`.
        """
        decided = self._for_other_sizes(full)
        if decided is None:
            decided = self._decide(full, priced_program or full, group)
            self._decided.append(decided)
        if decided.kept is not None:
            part = replace(part, kept=decided.kept)
        with self._timings.of("cutting"):
            stages = stages_of_part(part, decided.stage_of, routed, self._plan.num_stages, decided.pinned)
        self._users = self._users or users_of(stages)
        self.first = self.first or stages
        return stages

    def _for_other_sizes(self, program: Program) -> _Decided | None:
        return next((each for each in self._decided if alike(each.program, program)), None)

    def _decide(self, full: Program, priced_program: Program, group: Group) -> _Decided:
        """The decisions for a program, by the costs of `priced_program`, which has the same nodes."""
        priced: Mapping[str, Cost] | None = None  # set if cuts are chosen
        if self._plan.num_stages == 1:
            numbers = [0] * len(full.nodes)
        else:
            with self._timings.of("choosing cuts"):
                chosen = on_rank_0(group, lambda: self._choose(priced_program), PlanError)
            choice, priced = chosen or (None, None)
            numbers, times = share(group, self._shared(full, choice) if choice else None)
            self.choice = self.choice or choice
            if self._times is None and times:
                self._times = StageTimes(durations=Durations(**times["durations"]), limits=times["limits"])
                self._schedules.clear()
        kept: frozenset[str] | None = None
        if self._plan.recompute != "none" and full.training:
            # One rank decides, by its rates; all ranks of a team must recompute the same nodes.
            with self._timings.of("choosing what to keep"):
                decided = on_rank_0(group, lambda: self._kept(priced_program, priced), PlanError)
            kept = frozenset(share(group, decided))
        stage_of = {node.name: number for node, number in zip(full.nodes, numbers, strict=True)}
        return _Decided(program=full, stage_of=stage_of, kept=kept, pinned=self._pinned())

    def _shared(self, full: Program, choice: CutChoice) -> tuple[list[int], dict[str, Any] | None]:
        """The stage of each node; and by what all ranks search the same schedule, if the plan's is searched."""
        stages = choice.stages if full.training else ()
        times = stage_times(self._plan, stages, self._rates_here(full), self.sizes)
        return [choice.stage_of[node.name] for node in full.nodes], asdict(times) if times else None

    def _rates_here(self, full: Program) -> Rates:
        self.rates = self.rates or rates_here(full.device.type, self._plan.pp)
        return self.rates

    def _choose(self, full: Program) -> tuple[CutChoice, Mapping[str, Cost] | None]:
        """The cuts, and the costs if they were needed."""
        rates = self._rates_here(full)
        priced: Mapping[str, Cost] | None = None

        def choose() -> CutChoice:
            nonlocal priced
            with self._timings.of("prices"):
                priced = costs(full)
            return choose_stages(
                full, priced, self._plan, rates, self.sizes, self._users, pinned=self._pinned(), told=self._timings.counted
            )  # fmt: skip

        stored = self._stored if self._users is None else None
        return stored_cuts(stored, full, rates, choose, plan=self._plan, sizes=self.sizes), priced

    def _pinned(self) -> frozenset[str]:
        """Buffers that change in a program so far, and are where that changes them."""
        return frozenset[str]().union(*(each.program.changing for each in self._decided))

    def _kept(self, full: Program, priced: Mapping[str, Cost] | None) -> list[str]:
        rates, mode = self._rates_here(full), self._plan.recompute
        return cached_saved_values(
            self._stored, full, rates, lambda: sorted(kept_values(full, priced, mode, rates)), mode=mode
        )


def stages_of_part(
    part: Program, stage_of: Mapping[str, int], routed: Mapping[str, RoutedRows], num_stages: int, pinned: Collection[str] = (),
) -> tuple[Stage, ...]:  # fmt: skip
    """The stages of one rank's part along tp. stage_of: of the full program's nodes. routed: values with
    rows that data routes to this rank. pinned: as for `computed_from_batch`."""
    part = split_fused_layers(part, stage_of)
    placed = restore_routed_rows(part, with_reshard_stages(part, stage_of), routed, pinned)
    return cut_into_stages(*duplicate_reshards(*placed), num_stages, pinned)


def with_reshard_stages(part: Program, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of every node of one rank's part: the full program's; for reshards, where fewer bytes are
    sent.

    A reshard that enlarges a value runs where its result is used, and so do reshards fused with layers and
    those that take routed rows, whose number other ranks do not know. All others run where the value is
    produced.
    """
    found = dict(stage_of)
    first_use: dict[str, int] = {}
    for node in reversed(part.nodes):
        here = stage_of.get(node.name, first_use.get(node.name))
        for ref in node.operands():
            if here is not None:
                first_use[ref.name] = min(first_use.get(ref.name, here), here)
    for node in part.nodes:
        if node.name in found:
            continue
        producers = [found[ref.name] for ref in node.operands() if ref.name in found]
        at_use = isinstance(node.target, GatheredLayers) or node.target in (rows_here, take_rows)
        if isinstance(node.target, Transition):  # that enlarges the value
            at_use = node.target.source == "part" and node.target.target != "part"
        if node.target is place_rows:
            producers = producers[:1]
        if at_use or not producers:
            producers = [first_use.get(node.name, 0), *producers]
        found[node.name] = max(producers)
    return found
