"""A call of a module whose forward is cut into stages: its microbatches run through them here, and backward when autograd comes to the
results.

    forward of all microbatches -> results, joined, on every rank of the pipeline -> the script's loss, on each of them
    backward of the loss        -> the last stage begins with the gradients of its results; other ranks' copies of these count nothing

Where the script gives the loss away (`ml.train_step`), forwards and backwards follow each other as the plan's schedule says, and autograd
finds gradients that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.errors import TrainingError
from meshloom.core.losses.loss_sum import as_sum
from meshloom.loops.call_microbatches import Microbatch, is_joined, joined_result
from meshloom.loops.captured_forward import results
from meshloom.pipeline.runtime.microbatches import forward_only
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.runtime.run import PipelineRun
from meshloom.pipeline.runtime.stage import StageRun
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.stages import Crossing, Stage
from meshloom.program.ir.nodes import Meta, Ref
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import refuse_second_derivative
from meshloom.tensor_parallel.layout.layout import metas_of


class _OneWay(StageRun):
    """Of a stage, its forwards, whose backwards come later, or its backwards, as forwards of one in the opposite place."""

    def __init__(self, stage: ProgramStage) -> None:
        self._stage = stage

    def backward(self, microbatch: int) -> Mapping[str, Tensor]:
        raise AssertionError("nothing comes back")


class _Forwards(_OneWay):
    """produced: by microbatch."""

    def __init__(self, stage: ProgramStage) -> None:
        super().__init__(stage)
        self.produced: dict[int, Mapping[str, Tensor]] = {}

    def receive(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        self._stage.receive(microbatch, values)

    def forward(self, microbatch: int) -> Mapping[str, Tensor]:
        found = self.produced[microbatch] = self._stage.forward(microbatch)
        return found

    def clear(self) -> None:
        """Keeps what backwards need."""


class _Backwards(_OneWay):
    """Its values are gradients."""

    def receive(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        self._stage.receive_gradients(microbatch, values)

    def forward(self, microbatch: int) -> Mapping[str, Tensor]:
        return self._stage.backward(microbatch)

    def clear(self) -> None:
        self._stage.clear()


class CallStages(NamedTuple):
    """What one call runs on one rank of `pp`. stages: by microbatch, all of them. make: this rank's run of a stage, given by microbatch, with
    further settings of `ProgramStage`."""

    schedule: Schedule
    stages: Sequence[Sequence[Stage]]
    pp: Group
    device: torch.device
    make: Callable[..., ProgramStage]

    @property
    def last(self) -> int:
        return self.schedule.num_stages - 1

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's stages."""
        return self.schedule.stages_of(self.pp.rank)

    @property
    def crossings(self) -> list[list[Crossing]]:
        """[microbatch], the values exchanged between stages."""
        return [[one for each in of_all for one in each.incoming] for of_all in self.stages]

    def forwards(
        self, schedule: Schedule, runs: Mapping[int, StageRun], crossings: Sequence[Sequence[Crossing]]
    ) -> None:
        """Runs what a stage does alone, microbatch after microbatch, in the direction of `schedule`; nothing comes back."""
        one_way = [[replace(one, meta=replace(one.meta, requires_grad=False)) for one in each] for each in crossings]  # fmt: skip
        PipelineRun(forward_only(schedule), self.pp, runs, one_way, self.device).run()

    def of(self, number: int) -> list[Stage]:
        """A stage, by microbatch."""
        return [each[number] for each in self.stages]

    def everywhere(self, value: Tensor) -> Tensor:
        """What the rank of the last stage has in this place, on every rank."""
        self.pp.broadcast(value.view(-1), self.schedule.ranks[self.last]).wait()
        return value


class PipelinedCall:
    """One call: all forwards, and later all backwards."""

    def __init__(self, microbatches: Sequence[Microbatch], run: CallStages) -> None:
        self._run, self._microbatches, self._grad = run, microbatches, torch.is_grad_enabled()
        self._results = [results_of(each[run.last].program) for each in run.stages]
        self._stages = {
            number: run.make([_with_results(each) if number == run.last else each for each in run.of(number)])
            for number in run.own
        }
        rows = [each.rows for each in microbatches]
        shapes = [[meta.shape for meta in metas] for metas in self._results]
        self._joined = [is_joined([each[at] for each in shapes], rows) for at in range(len(self._results[0]))]

    @property
    def differentiable(self) -> list[bool]:
        """Of each result, whether it has a gradient."""
        return [each.requires_grad for each in self._results[0]]

    @property
    def has_means(self) -> bool:
        """Whether a result is the mean of those of several microbatches."""
        return len(self._microbatches) > 1 and not all(self._joined)

    def forward(self) -> list[Tensor]:
        """The results of the whole batch, on every rank."""
        forwards = {number: _Forwards(each) for number, each in self._stages.items()}
        with torch.set_grad_enabled(self._grad):
            self._run.forwards(self._run.schedule, forwards, self._run.crossings)
        last = forwards.get(self._run.last)
        return [self._everywhere(at, last.produced if last else {}) for at in range(len(self._joined))]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Leaves gradients in the parameters and the microbatches' tensors. gradients: of the results."""
        last = self._run.last
        if last in self._stages:
            for number in range(len(self._microbatches)):
                given = {_result(at): self._part(at, number, each) for at, each in enumerate(gradients) if each is not None}  # fmt: skip
                self._stages[last].receive_gradients(number, given)
        schedule = replace(self._run.schedule, ranks=self._run.schedule.ranks[::-1])
        back = [
            [replace(one, source=last - one.destination, destination=last - one.source) for one in each if one.meta.requires_grad]
            for each in self._run.crossings
        ]  # fmt: skip
        runs = {last - number: _Backwards(each) for number, each in self._stages.items()}
        self._run.forwards(schedule, runs, back)

    def _everywhere(self, at: int, produced: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        metas = [each[at] for each in self._results]
        if self._joined[at]:
            shape = (sum(each.shape[0] for each in metas), *metas[0].shape[1:])
        else:
            shape = metas[0].shape
        if not produced:
            return self._run.everywhere(torch.empty(shape, dtype=metas[0].dtype, device=self._run.device))
        parts = [produced[number][_result(at)] for number in range(len(self._microbatches))]
        found = joined_result(parts, self._microbatches)
        assert found is not None, "the forward was compared so"
        return self._run.everywhere(found.contiguous())

    def _part(self, at: int, number: int, gradient: Tensor) -> Tensor:
        """Of the gradient of a result, that of a microbatch's."""
        metas = [each[at] for each in self._results]
        if self._joined[at]:
            return gradient.split([each.shape[0] for each in metas])[number]
        return gradient * self._microbatches[number].share


class PipelinedStep:
    """One call of a loss, by the plan's schedule. learned: leaves of graphs to which backwards come. kind: of the loss."""

    differentiable = (True, False)

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        run: CallStages,
        learned: Sequence[Tensor],
        kind: torch.dtype,
    ) -> None:
        self._run, self._learned, self._kind = run, learned, kind
        self._sums = torch.zeros(
            2, dtype=torch.float64, device=run.device
        )  # of losses, and of what they count

        def finish(number: int, values: Sequence[Any]) -> Tensor:
            returned = results(values, run.stages[number][run.last].returned)
            total, weight = as_sum(returned, microbatches[number].rows)
            self._sums += torch.stack(
                [total.detach().double(), torch.as_tensor(weight, device=run.device).double()]
            )
            return total

        split = bool(run.schedule.split)
        self._stages = {
            number: run.make(run.of(number), split=split, finish=finish if number == run.last else None)
            for number in run.own
        }

    def forward(self) -> list[Tensor]:
        """The sum of the losses and what they count, on every rank."""
        run = self._run
        with torch.enable_grad():
            PipelineRun(run.schedule, run.pp, self._stages, run.crossings, run.device).run()
        total, weight = run.everywhere(self._sums).clone()
        return [total.to(self._kind), weight.to(self._kind)]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """As of `PipelinedCall`."""
        for each in self._learned:
            if each.grad is not None and gradients[0] is not None:
                each.grad *= gradients[0]


class PipelinedResults(torch.autograd.Function):
    """The results of a `PipelinedCall` or a `PipelinedStep` of these tensors, whose gradients `leave` gives once backward has run through it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: PipelinedCall | PipelinedStep,
        leave: Callable[[], Sequence[Tensor | None]],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call, ctx.leave = call, leave
        ctx.set_materialize_grads(False)
        found = call.forward()
        ctx.mark_non_differentiable(
            *(each for each, has in zip(found, call.differentiable, strict=True) if not has)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        if ctx.call is None:
            raise TrainingError(
                "A second backward through one call of a module that a pipeline computes. Call the module again, or add the losses up before."
            )
        ctx.call.backward(gradients)
        ctx.call = None
        return None, None, None, *ctx.leave()


def results_of(program: Program) -> list[Meta]:
    """The shapes of what the last stage's program returns."""
    known = metas_of(program)
    return [known[each.name][0] for each in program.outputs if isinstance(each, Ref)]


def _with_results(last: Stage) -> Stage:
    """The last stage, which hands its results on as others their values: their gradients arrive as those do."""
    results = (
        Crossing(value=_result(at), source=last.number, destination=last.number + 1, meta=meta) for at, meta in enumerate(results_of(last.program))
    )  # fmt: skip
    return replace(last, outgoing=tuple(results))


def _result(at: int) -> str:
    return f"result {at}"
