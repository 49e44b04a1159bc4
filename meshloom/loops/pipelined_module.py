"""Pipeline parallel, with tensor parallel within stages or without: a call's microbatches run through the stages of the captured forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.job import LossFunction
from meshloom.loops.call_microbatches import Microbatch, check_loss, check_rows, microbatches_of
from meshloom.loops.call_weight import said_of
from meshloom.loops.captured_forward import CapturedForward, results
from meshloom.loops.divided_module import DividedModule
from meshloom.loops.execution import StepLoss
from meshloom.loops.part_tensor import plain
from meshloom.loops.pipelined_call import (
    CallStages,
    PipelinedCall,
    PipelinedResults,
    PipelinedStep,
    results_of,
)
from meshloom.loops.taken_shares import bind, is_alike
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.capture.restored import cloned
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program


class _Call(NamedTuple):
    """own: this rank's parameters, as leaves of a graph of the call. left: key of what the forward leaves."""

    microbatches: list[Microbatch]
    run: CallStages
    own: Mapping[str, Tensor]
    apply: Callable[[PipelinedCall | PipelinedStep], Any]
    left: Any


class PipelinedModule(DividedModule):
    """On the ranks along pp."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._said = False  # how results without rows are joined
        self._losses: dict[Any, LossFunction] = {}  # by their lines

    def step(self, loss: LossFunction, batch: Any) -> StepLoss:
        """Of a loss of the module and a batch. What has a gradient has it when autograd comes to the result."""
        if self.weight is not None:
            raise JobError(
                "The loss of ml.train_step() says itself what it counts, as (sum, count). Leave parallel(weight=...) out."
            )
        self._check_loss(loss)
        share, forward = bind(batch), self._forward((), batch, loss)
        self._weight = share.weight if share else 1.0
        call = self._begun(forward, batch, check_loss)
        last = call.run.stages[0][call.run.last]
        learned = [
            *call.own.values(),
            *(one for each in call.microbatches for one in each.leaves.tensors.values()),
        ]
        made = PipelinedStep(call.microbatches, call.run, learned, results_of(last.program)[0].dtype)
        total, weight = call.apply(made)
        self.mean.follow(total, share)
        self._end(forward, batch, call)
        return StepLoss(total, weight, is_mean=len(last.returned.children()) != 2)

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    def _run(self, forward: CapturedForward, batch: Mapping[str, Any]) -> Any:
        call = self._begun(forward, batch, check_rows)
        made = PipelinedCall(call.microbatches, call.run)
        self._note(call.microbatches, has_means=made.has_means)
        values = call.apply(made)
        self._end(forward, batch, call)
        return results(values, call.run.stages[0][call.run.last].returned)

    def _note(self, microbatches: Sequence[Microbatch], *, has_means: bool) -> None:
        name, plan, by_rows = type(self._module).__name__, self._ranks.plan, microbatches[0].by_rows
        note = ""
        if has_means and by_rows:
            note = f"Results of {name} without a row for each of its inputs are means over microbatches, by rows where no parallel(weight=...) counts."
        elif not has_means and not by_rows and plan.dp == 1:
            note = f"Each result of {name} has a row for each of its inputs: parallel(weight=...) changes nothing under {plan}."
        if note and not self._said:
            self._said = True
            self._notes.append(note)

    def _check_loss(self, loss: LossFunction) -> None:
        """Raises `JobError` where it is new in each step."""
        code = getattr(loss, "__code__", loss)
        if self._losses.setdefault(code, loss) is not loss:
            raise JobError(
                "ml.train_step() gets a function that was made anew, and would capture each. Define the loss once, outside of the loop, and give it "
                "what changes with the batch."
            )

    def _begun(self, forward: CapturedForward, batch: Any, check: Callable[..., None]) -> _Call:
        """The call's microbatches and stages. check: of copies of the whole module, before a forward's first capture."""

        def say(part: Mapping[str, Any]) -> float | None:
            return None if self.weight is None else said_of(self.weight, *forward.arguments(part))

        microbatches, along = microbatches_of(batch, self._ranks.plan.microbatches, self._batch, say)

        def checked(copy: Callable[[], nn.Module]) -> None:
            check(copy, forward, cloned(batch), microbatches)

        ready, left = self._ready(forward, batch, [each.batch for each in microbatches], checked)
        self._follow(forward.trained)
        grad = forward.graded is not None
        completed = {name: each for name, each in self._completed().items() if self._share.holds(name)}
        own = {
            name: each.detach().requires_grad_(each.requires_grad and grad)
            for name, each in completed.items()
        }
        stages = [self._programs.stages(each.key) for each in ready]

        def make(of: Sequence[Stage], **settings: Any) -> ProgramStage:
            return ProgramStage(
                of, own, self._buffers, lambda number: microbatches[number].leaves, group=self._group,
                around=partial(self._around, forward, of[0].number), bind=self._bind, **settings,
            )  # fmt: skip

        schedule = self._programs.cutter.schedule(len(microbatches))
        run = CallStages(schedule, stages, self._pp, self._ranks.device, make)
        tensors, graded = leaves_of(batch).tensors, forward.graded or ()
        # those of other stages, too: an optimizer steps, and a norm counts, the same parameters on every rank
        names = [name for name, each in self._parameters.items() if each.requires_grad and grad]

        def leave() -> list[Tensor | None]:
            parts = {name: [each.leaves.tensors[name] for each in microbatches] for name in graded}
            inputs = [self._of_input(each, along.get(name)) for name, each in parts.items()]
            self._add_up_lent(own, stages[0][0].program)
            return [*inputs, *self._of_stages(own, names)]

        def apply(call: PipelinedCall | PipelinedStep) -> Any:
            anchor = torch.zeros((), requires_grad=grad)
            inputs = (tensors[name] for name in graded)
            parameters = (completed.get(name, plain(self._parameters[name])) for name in names)
            return PipelinedResults.apply(call, leave, anchor, *inputs, *parameters)

        return _Call(microbatches, run, own, apply, left)

    @contextmanager
    def _around(self, forward: CapturedForward, stage: int, microbatch: int) -> Iterator[None]:
        with self._statistics[forward][stage].chunk(), self._draws.of_a_call():
            yield

    def _end(self, forward: CapturedForward, batch: Any, call: _Call) -> None:
        """Buffers and values are what the call has left, on any rank: a script reads them."""
        run = call.run
        self._left.put(call.left)
        for each in self._statistics[forward].values():
            each.finish(alike=each.merges and is_alike(self._ranks.replicas, batch))
        for stage in run.stages[0]:
            for name in sorted(stage.program.changing - self._share.shards.pieces.keys()):
                self._pp.broadcast(self._buffers[name].view(-1), run.schedule.ranks[stage.number]).wait()

    def _of_input(self, parts: Sequence[Tensor], dim: int | None) -> Tensor:
        """The gradient of an input, of which each stage that reads it has some. parts: of microbatches, cut along `dim`; None: each has the
        whole."""
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parts]
        found = torch.stack(gradients).sum(0) if dim is None else torch.cat(gradients, dim)
        self._pp.all_reduce(found.view(-1)).wait()
        return found

    def _of_stages(self, own: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor | None]:
        """The gradients of this rank's parameters, and empty ones of those that other stages have and have used."""
        has = torch.tensor(
            [float(name in own and own[name].grad is not None) for name in names], device=self._ranks.device
        )
        self._pp.all_reduce(has).wait()
        return [
            own[name].grad
            if name in own
            else torch.zeros_like(plain(self._parameters[name].detach()))
            if used
            else None
            for name, used in zip(names, has.tolist(), strict=True)
        ]

    def _add_up_lent(self, own: Mapping[str, Tensor], program: Program) -> None:
        """Gradients of parameters that several stages use become the sums of theirs, on each of them."""
        names = [name for name in self._share.lent if self._parameters[name].requires_grad]
        if not names:
            return
        device = self._ranks.device
        for name in names:
            meta = program.parameters[name].meta
            sent = torch.zeros(math.prod(meta.shape) + 1, dtype=meta.dtype, device=device)
            gradient = own[name].grad if name in own else None
            if gradient is not None:
                sent[:-1], sent[-1] = gradient.reshape(-1), 1
            self._pp.all_reduce(sent).wait()
            if name in own and sent[-1]:
                own[name].grad = sent[:-1].view(meta.shape)
