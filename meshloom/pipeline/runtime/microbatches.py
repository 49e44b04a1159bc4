"""Runs a replica's microbatches through this rank's stages, by the plan's schedule, or forward only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from meshloom.comm.group import Group
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.pipeline.runtime.gradient_readiness import Readiness
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.runtime.run import ActionListener, PipelineRun, Sent
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.stages.program_store import ProgramStore, ReadyBatch
from meshloom.pipeline.stages.stage_traffic import sent_by_rank, sent_over_tp, traffic_of_ranks
from meshloom.pipeline.stages.stages import Crossing, Stage
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.program.opaque.bound import bound
from meshloom.program.operators.fused_grad_accumulation import GradAccumulator
from meshloom.program.operators.used_rows import UsedRows
from meshloom.program.run.compiler import Compiler
from meshloom.program.store.fifo_cache import FifoCache
from meshloom.program.store.program_key import ProgramKey

Visit = Callable[[int, Node, Any], None]  # sees stage, node and value, in order
# microbatch, what the loss returned for it -> where backward starts
Finish = Callable[[int, Any], Tensor | None]
MOST_KEPT = 64  # combinations of a step's microbatch shapes whose runs are cached


class Around(Protocol):
    """The context of every forward."""

    def __call__(self, stage: int, microbatch: int) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Built once for microbatches of the same shapes."""

    run: PipelineRun
    stages: Mapping[int, ProgramStage]
    readiness: Readiness


class Microbatches:
    """A rank's stages with their parameters, buffers and groups.

    parameters, buffers: this rank's, by name. pp, tp: the ranks along these axes; tp None: there is one.
    ready: id of a parameter -> called with it once its gradient is complete. accumulator: accumulates the weight gradients of
        linear layers; None: autograd. each_microbatch: as for `Readiness`.
    units: gathers the parameters where they are used, if this rank keeps slices of them. Then replicas take
        actions together: one that has fewer microbatches passes over the others' (`meet`).
    used_rows: notes which rows of tables are looked up. compiler: compiles what is computed in training.
    """

    def __init__(
        self, programs: ProgramStore, model: nn.Module, parameters: Mapping[str, nn.Parameter], pp: Group, tp: Group | None,
        device: torch.device, ready: Mapping[int, Callable[[nn.Parameter], None]], accumulator: GradAccumulator | None = None, *,
        each_microbatch: bool = False, units: UnitAccess | None = None, used_rows: UsedRows | None = None,
        compiler: Compiler | None = None,
    ) -> None:  # fmt: skip
        self._accumulator, self._units, self._compiler = accumulator, units, compiler
        self._used_rows = used_rows or UsedRows({}, device)
        self._meet = units.action_ended if units else None
        self._each_microbatch = each_microbatch
        self._programs, self._parameters = programs, parameters
        self._model, self._buffers = model, LiveBuffers(model)
        self._pp, self._tp, self._device, self._ready = pp, tp, device, ready
        self._known: dict[tuple[int, *tuple[ProgramKey, ...]], _Known] = FifoCache(MOST_KEPT)
        self._step: tuple[_Known, Sequence[ReadyBatch], Finish, Around] | None = None  # that was prepared
        self._readiness: Readiness | None = None  # of the current run
        self._batches: Sequence[ReadyBatch] = ()
        self._finish: Finish = lambda microbatch, returned: None
        self._around: Around | None = None

    def prepare(
        self, batches: Sequence[ReadyBatch], most: int, finish: Finish, around: Around
    ) -> Sequence[Action]:
        """The actions of the next `train`, on these microbatches. most: those of the replica that has most. finish: microbatch, what the loss
        returned for it -> where backward starts; on the last stage."""
        self._step = None
        if not batches:
            return ()
        known = self._get([each.key for each in batches], most)
        self._step = known, batches, finish, around
        return known.run.actions

    def train(self, listeners: Sequence[ActionListener] = ()) -> Sent:
        """Forward and backward of all microbatches; returns what this rank sent."""
        if self._step is None:
            return {}
        (known, batches, finish, around), self._step = self._step, None
        self._readiness = known.readiness
        known.readiness.begin()
        try:
            return self._run(known.run, batches, finish, around, [known.readiness, *listeners])
        finally:
            self._readiness = None

    def evaluate(self, batch: ReadyBatch, take: Callable[[Any], None]) -> Sent:
        """Forward of one batch in evaluation mode; returns what this rank sent. take: gets what the metric returned, on the last stage."""

        def finish(microbatch: int, returned: Any) -> None:
            take(returned)

        known = self._get([batch.key])
        with torch.no_grad():
            return self._run(known.run, [batch], finish, None)

    def look(
        self,
        batches: Sequence[ReadyBatch],
        around: Around,
        visit: Visit,
        *,
        most: int = 0,
    ) -> None:
        """Forwards of microbatches as `train` runs them, one after another, without gradients or changes to buffers: each finds these
        as they are. most: microbatches of the replica that has most."""
        keys = [each.key for each in batches]
        known = self._get(keys, most if self._units else 0)
        of_all = forward_only(self._programs.cutter.schedule(max(most, len(keys))))
        schedule = first_microbatches(of_all, len(keys))
        buffers, fresh = _with_buffers_anew(self._buffers, around)
        crossings = [_crossings(self._programs.stages(each), False) for each in keys]
        others = _others_between(of_all, schedule, self._pp.rank)
        run = PipelineRun(
            schedule, self._pp, known.stages, crossings, self._device, meet=self._meet, of_others=others
        )
        with ExitStack() as watching, torch.no_grad():
            for number, stage in known.stages.items():
                watching.enter_context(stage.watched(partial(visit, number), buffers))
            self._run(run, batches, lambda microbatch, returned: None, fresh)

    def arrived(self, parameter: nn.Parameter) -> None:
        """Gradient hook: autograd has accumulated a parameter's gradient."""
        if self._readiness:
            self._readiness.arrived(parameter)

    def _run(
        self, run: PipelineRun, batches: Sequence[ReadyBatch], finish: Finish, around: Around | None, listeners: Sequence[ActionListener] = ()
    ) -> Sent:  # fmt: skip
        self._batches, self._finish, self._around = batches, finish, around
        try:
            run.run(listeners)
        finally:
            self._batches = ()
        return run.sent

    def _get(self, keys: Sequence[ProgramKey], most: int = 0) -> _Known:
        key = max(most, len(keys)), *keys
        if key not in self._known:
            self._known[key] = self._make(keys, key[0])
        return self._known[key]

    def _make(self, keys: Sequence[ProgramKey], most: int) -> _Known:
        stages, training = [self._programs.stages(each) for each in keys], keys[0].training
        of_all = self._programs.cutter.schedule(most)
        of_all = of_all if training else forward_only(of_all)
        schedule = first_microbatches(of_all, len(stages))
        last = schedule.num_stages - 1
        mine = schedule.stages_of(self._pp.rank)
        runs = {
            number: self._stage_run([each[number] for each in stages], number == last, bool(schedule.split))
            for number in mine
        }
        crossings = [_crossings(each, training) for each in stages]
        names = {
            number: dict.fromkeys(name for each in stages for name in each[number].parameters)
            for number in mine
        }
        used = {
            number: [each for name in names[number] if id(each := self._parameters[name]) in self._ready]
            for number in mine
        }
        over_pp = sent_by_rank(traffic_of_ranks(crossings, schedule.ranks), self._pp.rank)
        own = [each[number] for each in stages for number in mine]
        over_tp = sent_over_tp(own, self._tp.rank) if self._tp else Counter[str]()
        others = _others_between(of_all, schedule, self._pp.rank)
        readiness = Readiness(
            schedule,
            self._pp.rank,
            used,
            lambda each: self._ready[id(each)](each),
            each_microbatch=self._each_microbatch,
        )
        run = PipelineRun(
            schedule, self._pp, runs, crossings, self._device, meet=self._meet, of_others=others, sent={"pp": {"send": over_pp}, "tp": over_tp}
        )  # fmt: skip
        return _Known(run=run, stages=runs, readiness=readiness)

    def _stage_run(self, stages: Sequence[Stage], is_last: bool, split: bool) -> ProgramStage:
        number = stages[0].number

        def around(microbatch: int) -> AbstractContextManager[Any]:
            if self._around is None:
                return nullcontext()
            return self._around(number, microbatch)

        def finish(microbatch: int, values: Sequence[Any]) -> Tensor | None:
            return self._finish(microbatch, tree_unflatten(list(values), stages[microbatch].returned))

        return ProgramStage(
            stages,
            self._parameters,
            self._buffers,
            lambda microbatch: self._batches[microbatch].leaves,
            finish=finish if is_last else None,
            group=self._tp,
            split=split,
            around=around,
            accumulator=self._accumulator if stages[0].program.training else None,
            elsewhere=self._units,
            compiler=self._compiler if stages[0].program.training else None,
            bind=lambda program: self._used_rows.recorded(bound(program, self._model)),
        )


def _with_buffers_anew(buffers: Mapping[str, Tensor], around: Around) -> tuple[Mapping[str, Tensor], Around]:
    """Copies of buffers, and `around` a forward that finds them as they are now."""
    live = {name: each for name, each in buffers.items() if not each.is_meta}
    copies = {name: each.clone() for name, each in live.items()}

    def fresh(stage: int, microbatch: int) -> AbstractContextManager[Any]:
        copies.update({name: each.clone() for name, each in live.items()})
        return around(stage, microbatch)

    return copies, fresh


def first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The actions of the first microbatches, in the schedule's order."""
    actions = tuple(
        tuple(each for each in row if each.microbatch < num_microbatches) for row in schedule.actions
    )
    return replace(schedule, num_microbatches=num_microbatches, actions=actions)


class LiveBuffers(Mapping[str, Tensor]):
    """A model's current buffers by name: a module may replace a buffer's tensor."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._places = {
            name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, _ in named_buffers(model, remove_duplicate=False)
        }

    def __getitem__(self, name: str) -> Tensor:
        module, key = self._places[name]
        tensor: Tensor = getattr(module, key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def forward_only(schedule: Schedule) -> Schedule:
    """The same stages on the same ranks, microbatch after microbatch, without backward."""
    numbers = range(schedule.num_microbatches)
    actions = tuple(
        tuple(Action(stage, "F", number) for number in numbers for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    )
    return replace(schedule, actions=actions)


def _others_between(of_all: Schedule, schedule: Schedule, rank: int) -> list[int]:
    """How many actions of a rank in `of_all` are not in `schedule`, before each that is and after the last."""
    found = [0]
    for action in of_all.actions[rank]:
        if action.microbatch < schedule.num_microbatches:
            found.append(0)
        else:
            found[-1] += 1
    return found


def _crossings(stages: Sequence[Stage], training: bool) -> list[Crossing]:
    """All values sent between these stages; in evaluation they have no gradients."""
    crossings = [crossing for stage in stages for crossing in stage.incoming]
    if training:
        return crossings
    return [replace(each, meta=replace(each.meta, requires_grad=False)) for each in crossings]
