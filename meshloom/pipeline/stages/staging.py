"""A replica's loss as stages: for every loss function, mode and shape of batch, with the same parameters in
the same stages.

    program of the loss --(over tp: this rank's part)--> stages 0, 1, ...   those of this rank along pp are run here

One rank chooses where to cut, by what the operators of the whole program cost, and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.objects import collect, on_first, share
from meshloom.comm.steps import Steps
from meshloom.core.errors import PlanError
from meshloom.core.job import Job, LossFunction
from meshloom.core.plan import Plan
from meshloom.core.timings import Timings
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.cut import CutChoice
from meshloom.pipeline.stages.cutting import choose_stages, schedule_of
from meshloom.pipeline.stages.made_per_stage import changes_apart, layers_apart, rows_apart
from meshloom.pipeline.stages.stage_forms import StageForms
from meshloom.pipeline.stages.stages import Stage, cut_into_stages, users_of
from meshloom.pipeline.stages.stored_cuts import cut_before
from meshloom.program.cost.cost import Cost, costs
from meshloom.program.cost.rates import Rates, rates_here
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.experts import place_rows, rows_here, take_rows
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.program.recompute.recompute import kept_values
from meshloom.program.sizes.any_size import sizes_of_batch, sizes_of_program
from meshloom.program.sizes.forms import alike
from meshloom.program.sizes.symbolic import Sizes
from meshloom.program.store.newest import Newest
from meshloom.program.store.stored import Stored
from meshloom.program.store.stored_costs import kept_before
from meshloom.tensor_parallel.loss_programs import LossPrograms, Shapes
from meshloom.tensor_parallel.partition import RoutedRows

Key = tuple[LossFunction, bool, Shapes]
MOST_KEPT = 32  # shapes of batches whose stages are kept after they were made; those of others are made again


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """What was decided for a program, and holds for it at other sizes. stage_of: of each node. kept: as in
    `Program`."""

    program: Program
    stage_of: Mapping[str, int]
    kept: frozenset[str] | None


class Staging:
    """The stages of `job`'s loss under `plan`, as a rank with `programs` runs them. rates: default: of the
    machine of the rank that chooses."""

    def __init__(
        self, job: Job, plan: Plan, programs: LossPrograms, team: Group, *, rates: Rates | None = None, timings: Timings | None = None,
        stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self.programs = programs
        self._stored = stored
        self._timings = timings or Timings()
        self.others: Mapping[str, str | None] = {}  # of the first program: what besides tensors it is for
        self.choice: CutChoice | None = None  # of the first program, on the rank that chose
        self.first: tuple[Stage, ...] = ()  # of the program that decided who holds what
        self._job = job
        self._plan = plan
        self._team = team
        self.rates = rates  # that were used, on the rank that chose
        self._homes: dict[str, tuple[int, ...]] | None = None  # parameter or buffer -> the stages that use it
        self._cut: dict[Key, tuple[Stage, ...]] = {}
        self._formed: dict[Key, tuple[StageForms, Sizes]] = {}  # what stages are made of, instead
        self._made: dict[Key, tuple[Stage, ...]] = Newest(MOST_KEPT)
        self._forms: dict[int, StageForms] = {}  # by what was proved of a loss
        self._decided: list[_Decided] = []  # for programs that differ in more than sizes
        self._schedules: dict[int, Schedule] = {}  # by their microbatches

    @property
    def ranks(self) -> tuple[int, ...]:
        """Stage -> its rank along pp."""
        return self.schedule(1).ranks

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> the ranks along pp whose stages use it, in the order of the stages, but
        first who changes it."""
        assert self._homes is not None, "open() comes first"
        return {
            name: tuple(dict.fromkeys(self.ranks[stage] for stage in stages))
            for name, stages in self._homes.items()
        }

    def schedule(self, num_microbatches: int) -> Schedule:
        """The plan's, for so many microbatches."""
        if num_microbatches not in self._schedules:  # some are searched for
            self._schedules[num_microbatches] = schedule_of(self._plan, num_microbatches)
        return self._schedules[num_microbatches]

    @property
    def sizes(self) -> list[int]:
        """Samples of each microbatch in a full batch, of the replica that has most."""
        return self._plan.largest_share(self._job.batch_size)

    def open(
        self, batches: Sequence[Any], world: Group, model: nn.Module, *, own: Any = None
    ) -> Steps[tuple[Stage, ...]]:
        """Read the loss of batches like the first, divide it, cut it. All ranks of `world` call it; batches
        and model count on its rank 0.

        own: one of the batches in the job's own precision, if they were lifted to another.
        """
        shapes = yield from self.programs.open(batches, world, model, own=own)
        self.others = self.programs.whole(shapes).others
        return (yield from self._make(shapes, self._job.loss, True, world))

    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Steps[None]:
        """Make sure that batches like `batch` can be run. All ranks of the replica call it with the same
        batch."""
        function = loss or self._job.loss
        shapes = self.programs.shapes_of(batch, loss=function, training=training)
        key = (function, training, shapes) if shapes is not None else None
        if key in self._cut or key in self._formed:
            return
        sizes = sizes_of_batch(leaves_of(batch))
        forms = self._forms_for(batch, function, training)
        if forms is not None and key is not None and forms.trusts(sizes):
            made = forms.stages(sizes)
            if all((yield from collect(self._team, made is not None))):
                assert made is not None
                self._formed[key], self._made[key] = (forms, sizes), made
                return
        yield from self.programs.ready(batch, loss=function, training=training)
        stages = yield from self._make(
            self.shapes_of(batch, loss=function, training=training), function, training, self._team
        )
        forms = self._forms_for(batch, function, training)
        if forms is None:
            return
        for point in forms.proved.points if forms.is_new else ():
            there = self.programs.shapes_of_program(point)
            if (function, training, there) not in self._cut:
                yield from self._make(there, function, training, self._team)
            forms.learn(sizes_of_program(point), self._cut[function, training, there])
        if all((yield from collect(self._team, forms.learn(sizes, stages)))):
            forms.trust(sizes)

    def shapes_of(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Shapes:
        """Of a batch that is ready."""
        shapes = self.programs.shapes_of(batch, loss=loss, training=training)
        assert shapes is not None, "ready() comes first"
        return shapes

    def stages(
        self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True
    ) -> tuple[Stage, ...]:
        """All stages for batches of these shapes, which are ready: of the parts that this rank has along
        tp."""
        key = loss or self._job.loss, training, shapes
        if key in self._cut:
            return self._cut[key]
        if key not in self._made:
            forms, sizes = self._formed[key]
            made = forms.stages(sizes)
            assert made is not None, "it was made before"
            self._made[key] = made
        return self._made[key]

    def _forms_for(self, batch: Any, loss: LossFunction, training: bool) -> StageForms | None:
        proved = self.programs.proved(batch, loss=loss, training=training)
        return (
            self._forms.setdefault(id(proved), StageForms(proved, self._plan.tp))
            if proved is not None
            else None
        )

    def _make(
        self, shapes: Shapes, loss: LossFunction, training: bool, group: Group
    ) -> Steps[tuple[Stage, ...]]:
        whole = self.programs.whole(shapes, loss=loss, training=training)
        before = next((each for each in self._decided if alike(each.program, whole)), None)
        part = self.programs.program(shapes, loss=loss, training=training)
        if before is None:
            before = yield from self._decide(
                whole, self.programs.priced(shapes, loss=loss, training=training), group
            )
            self._decided.append(before)
        if before.kept is not None:
            part = replace(part, kept=before.kept)
        with self._timings.of("cutting"):
            stages = stages_of_part(
                part,
                before.stage_of,
                self.programs.routed(shapes, loss=loss, training=training),
                self._plan.num_stages,
            )
        if self._homes is None:
            self._homes = users_of(stages)
        self.first = self.first or stages
        self._cut[loss, training, shapes] = stages
        return stages

    def _decide(self, whole: Program, weighed: Program, group: Group) -> Steps[_Decided]:
        """By what the operators of `weighed` cost, which has the same nodes."""
        priced: Mapping[str, Cost] | None = None  # where the cuts are chosen
        if self._plan.num_stages == 1:
            numbers = [0] * len(whole.nodes)
        else:
            with self._timings.of("choosing cuts"):
                choice, priced = (yield from on_first(group, lambda: self._choose(weighed), PlanError)) or (
                    None,
                    None,
                )
            numbers: list[int] = yield from share(
                group, [choice.stage_of[node.name] for node in whole.nodes] if choice else None
            )
            self.choice = self.choice or choice
        kept: frozenset[str] | None = None
        if self._plan.recompute != "none" and whole.training:
            # One rank decides, by its rates; ranks of a team have to run the same again.
            with self._timings.of("choosing what to keep"):
                decided = yield from on_first(group, lambda: self._kept(weighed, priced), PlanError)
            kept = frozenset((yield from share(group, decided)))
        return _Decided(
            program=whole,
            stage_of={node.name: number for node, number in zip(whole.nodes, numbers, strict=True)},
            kept=kept,
        )

    def _rates_here(self, whole: Program) -> Rates:
        self.rates = self.rates or rates_here(whole.device.type, self._plan.pp)
        return self.rates

    def _choose(self, whole: Program) -> tuple[CutChoice, Mapping[str, Cost] | None]:
        """And the costs, if they were needed."""
        rates = self._rates_here(whole)
        priced: Mapping[str, Cost] | None = None

        def choose() -> CutChoice:
            nonlocal priced
            with self._timings.of("prices"):
                priced = costs(whole)
            return choose_stages(whole, priced, self._plan, rates, self.sizes, self._homes)

        stored = self._stored if self._homes is None else None
        return cut_before(stored, whole, rates, choose, plan=self._plan, sizes=self.sizes), priced

    def _kept(self, whole: Program, priced: Mapping[str, Cost] | None) -> list[str]:
        rates, mode = self._rates_here(whole), self._plan.recompute
        return kept_before(
            self._stored, whole, rates, lambda: sorted(kept_values(whole, priced, mode, rates)), mode=mode
        )


def stages_of_part(
    part: Program, stage_of: Mapping[str, int], routed: Mapping[str, RoutedRows], num_stages: int
) -> tuple[Stage, ...]:
    """The stages of one rank's part along tp. stage_of: of the whole program's nodes. routed: values with
    rows that data sends to this rank."""
    part = layers_apart(part, stage_of)
    placed = rows_apart(part, with_changes_placed(part, stage_of), routed)
    return cut_into_stages(*changes_apart(*placed), num_stages)


def with_changes_placed(part: Program, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of every node of one rank's part: its own, as in the whole program; of changes of placement
    where fewer bytes cross.

    A change that makes a value larger is made where it is wanted, and so is one with the layers that want it,
    and one that takes the rows that data sends to this rank, as nobody else knows how many they are; another
    one where the value is made.
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
        made = [found[ref.name] for ref in node.operands() if ref.name in found]
        grows = (
            isinstance(node.target, Transition)
            and node.target.source == "part"
            and node.target.target != "part"
        )
        grows |= isinstance(node.target, GatheredLayers) or node.target in (rows_here, take_rows)
        if node.target is place_rows:
            made = made[:1]
        found[node.name] = max(made) if made and not grows else max([first_use.get(node.name, 0), *made])
    return found
