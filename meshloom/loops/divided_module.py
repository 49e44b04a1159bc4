"""Tensor parallel: the module's forward is captured at its first call and divided; each rank keeps its shards of the parameters, runs its
part of the program, and gets whole results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.objects import on_rank_0
from meshloom.comm.pieces import Pieces
from meshloom.comm.simulated import simulated_groups
from meshloom.core.buffer_rules import BufferRule
from meshloom.core.errors import CaptureError, TrainingError
from meshloom.core.job import Job
from meshloom.core.modules.compiled import without_compilation
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.captured_forward import CapturedForward, autocast_here, named_inputs, results
from meshloom.loops.execution import Execution
from meshloom.loops.gradient_mean import GradientMean, tensors_in
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import bind
from meshloom.parameters.model import all_named, make_row_major, state_of
from meshloom.parameters.shards import Shards
from meshloom.pipeline.runtime.microbatches import LiveBuffers
from meshloom.pipeline.stages.program_store import MOST_KEPT, ProgramStore, ReadyBatch
from meshloom.program.capture.attempted import attempted
from meshloom.program.capture.guarded_values import GuardedValue, check_step
from meshloom.program.capture.guards import Guards
from meshloom.program.ir.batch_values import tensor_of
from meshloom.program.ir.leaves import Leaves, copy_of, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import keep_as_constants
from meshloom.program.opaque.bound import bound
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.run.execute import run_flat
from meshloom.program.store.fifo_cache import FifoCache
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.buffers.norm_statistics import decays
from meshloom.replica.gradient_completion import sum_over_tp
from meshloom.replica.team_sums import TeamSums
from meshloom.tensor_parallel.division import Division

MOST_CHANGES = 16  # of plain values that the forward reads, each of which is captured anew


class DividedModule(Execution):
    """`module` on the ranks along tp. leaves: modules that run as written. rules: of its buffers (docs/contract.md)."""

    def __init__(
        self, module: nn.Module, ranks: LoopRanks, leaves: Sequence[str | type[nn.Module]] = (), rules: Mapping[str, BufferRule] | None = None
    ) -> None:  # fmt: skip
        self._module, self._ranks, self._rules = module, ranks, rules or {}
        self._modules, self._parameters = list(module.modules()), dict(module.named_parameters())
        self._buffers = LiveBuffers(module)
        self._group, plan = ranks.own.groups["tp"], ranks.plan
        self._team = ranks.own.team or simulated_groups(1)[0]
        self._sums = TeamSums(None, self._group)
        self._division = Division(
            self._group, placements=plan.tp_placements, memory_bytes=plan.memory_bytes or None
        )
        self._programs = ProgramStore(
            _job(self._copy_of_copy, plan.num_chunks, leaves), plan, self._team, self._division
        )
        self._copy: nn.Module | None = None  # whole, on the replica's first rank, while a forward is captured
        self._shards: Shards | None = None  # None: everything is whole
        self._guards: dict[CapturedForward, list[GuardedValue]] = {}
        self._changes = 0
        self._statistics: dict[CapturedForward, RunningStatistics] = {}
        self._bound: dict[int, tuple[Program, Program]] = FifoCache(MOST_KEPT)  # with their leaves' modules
        self._draws = CallDraws(ranks.replica)
        self._mean: GradientMean | None = None  # over replicas
        self._trained: tuple[bool, ...] = ()  # of which that is
        self._before = 0  # backwards of means before

    def call(self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        positional, batch = named_inputs(self._module.forward, args, kwargs)
        share = bind((args, kwargs))
        forward = self._forward(positional, batch)
        if forward in self._guards and self._changes < MOST_CHANGES:
            try:
                check_step(self._guards[forward])
            except TrainingError:
                self._changes += 1
                forward = self._forward(positional, batch)
        ready = self._ready(forward, batch)
        check_step(self._guards[forward])
        self._follow(forward.trained)
        statistics = self._statistics[forward]
        with statistics.chunk():
            found = self._run(ready)
        statistics.finish()
        if self._mean and forward.graded is not None:
            self._mean.follow(tensors_in(found), share)
        return found

    def accumulating(self) -> AbstractContextManager[None]:
        return self._mean.accumulating() if self._mean else nullcontext()

    def check_complete(self) -> None:
        if self._mean:
            self._mean.check_complete()

    def whole(self) -> AbstractContextManager[None]:
        return self._whole(gradients=True)

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name, each in self._module.state_dict().items():
            yield name, partial(self._shards.gather, name, each) if self._shards else lambda each=each: each

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        divided = self._shards.pieces if self._shards else {}
        return ((name, each) for name, each in self._parameters.items() if name not in divided)

    @property
    def backwards(self) -> int:
        return self._before + (self._mean.backwards if self._mean else 0)

    def take_notes(self) -> list[str]:
        return [note for each in self._statistics.values() for note in each.take_notes()]

    def _forward(self, positional: tuple[str, ...], batch: Mapping[str, Any]) -> CapturedForward:
        graded = tuple(name for name, each in leaves_of(batch).tensors.items() if each.requires_grad)
        return CapturedForward(
            training=tuple(each.training for each in self._modules),
            trained=tuple(each.requires_grad for each in self._parameters.values()),
            graded=graded if torch.is_grad_enabled() else None,
            autocast=autocast_here(),
            positional=positional,
            changes=self._changes,
        )

    def _ready(self, forward: CapturedForward, batch: Mapping[str, Any]) -> ReadyBatch:
        """With a program for the batch. The first one decides what ranks keep, and all ranks make it together; further ones those of a
        replica."""
        training = self._module.training
        if not self._programs.has(batch, loss=forward, training=training):
            leaves = leaves_of(batch)
            like = leaves.rebuild([copy_of(each) for each in leaves.tensors.values()])
            with self._capturing(), forward.alone():
                if self._shards is None:
                    self._programs.losses.loss = forward
                    self._programs.open(
                        [like], self._ranks.everyone, self._copy or self._module, training=training
                    )
                ready = self._programs.ready(like, loss=forward, training=training, model=self._copy)
            if self._shards is None:
                self._keep(self._division.pieces)
            self._guards[forward] = Guards(forward, self._module, self._programs.opaque).values
            self._statistics.setdefault(forward, self._statistics_of(ready))
        return self._programs.ready(batch, loss=forward, training=training)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """A context in which the replica's first rank has a copy of the module, whole, which no hooks of parameters see."""
        with self._whole(gradients=False):
            self._copy = on_rank_0(self._team, self._whole_copy, CaptureError)
        try:
            yield
        except CaptureError as error:
            error.args = (str(error).replace("Job(", "parallel("),)
            raise
        finally:
            self._copy = None

    def _whole_copy(self) -> nn.Module:
        found, refused = attempted(lambda: copy.deepcopy(self._module, {id(self): self}))
        if found is None:
            raise CaptureError(f"The module cannot be copied to capture its forward: {refused}") from refused
        without_compilation(found)
        return keep_as_constants(found)

    def _copy_of_copy(self) -> nn.Module:
        assert self._copy is not None
        return copy.deepcopy(self._copy)

    def _keep(self, pieces: Mapping[str, Pieces]) -> None:
        """From now on this rank has its shards only, in the same parameters and buffers."""
        make_row_major(self._module)
        self._shards = Shards(pieces, self._group)
        names: dict[Tensor, list[str]] = {}
        for name, each in all_named(self._module):
            names.setdefault(each, []).append(name)
        for each, known in names.items():
            if self._shards.pieces_of(known, each) is not None:
                keep(each, self._shards, known[0])

    @contextmanager
    def _whole(self, *, gradients: bool) -> Iterator[None]:
        shards = self._shards
        divided = [
            (name, each) for name, each in state_of(self._module).items() if shards and name in shards.pieces
        ]
        given = [each.grad for _, each in divided]
        for (name, each), gradient in zip(divided, given, strict=True):
            each.grad = None
            each.data = shards.gather(name, each.detach())
            if gradients and gradient is not None:
                each.grad = shards.gather(name, gradient)
        try:
            yield
        finally:
            for (name, each), gradient in zip(divided, given, strict=True):
                keep(each, shards, name)
                if not gradients:
                    each.grad = gradient

    def _statistics_of(self, ready: ReadyBatch) -> RunningStatistics:
        """Of the buffers that a program changes."""
        (stage,) = self._programs.stages(ready.key)
        program = stage.program
        kept, named = decays(program.nodes), {each.value: name for name, each in program.buffers.items()}
        return RunningStatistics(
            self._module, self._ranks.replicas, rules=self._rules, changing=program.changing,
            decays={named[value]: each for value, each in kept.items() if value in named},
            opaque=[str(node.args[2]) for node in program.nodes if is_opaque(node)],
        )  # fmt: skip

    def _follow(self, trained: tuple[bool, ...]) -> None:
        """Parameters may have been frozen and unfrozen since the last call."""
        if self._ranks.plan.dp == 1 or trained == self._trained:
            return
        if self._mean:
            self._before += self._mean.backwards
            self._mean.close()
        named = {name: each for name, each in self._parameters.items() if each.requires_grad}
        replicated = tuple(name for name, _ in self.alike() if name in named)
        self._mean = GradientMean(named, self._ranks, replicated=replicated) if named else None
        self._trained = trained

    def _run(self, ready: ReadyBatch) -> Any:
        """The results. A backward may need a buffer as this forward saw it, and other forwards come in between."""
        (stage,) = self._programs.stages(ready.key)
        _, program = self._bound.get(id(stage.program), (None, None))
        if program is None:
            program = bound(stage.program, self._module)
            self._bound[id(stage.program)] = stage.program, program
        changed = {name: self._buffers[name].clone() for name in program.changing}
        with self._draws.of_a_call() if any(node.num_draws for node in program.nodes) else nullcontext():
            values = run_flat(
                program, self._completed(), {**self._buffers, **changed}, _inputs(program, ready.leaves), group=self._group
            )  # fmt: skip
        with torch.no_grad():
            for name, value in changed.items():
                self._buffers[name].copy_(value)
        return results(values, stage.returned)

    def _completed(self) -> dict[str, Tensor]:
        """The parameters. Gradients of those that several ranks have arrive at them summed over ranks that computed parts, and alike."""
        parameters: dict[str, Tensor] = dict(self._parameters)
        names = [
            name
            for name in dict.fromkeys([*self._programs.summed, *dict(self.alike())])
            if parameters[name].requires_grad
        ]
        if names and torch.is_grad_enabled():
            completed: Any = _Completed.apply(
                partial(self._complete, names), *(parameters[name] for name in names)
            )
            parameters.update(zip(names, completed, strict=True))
        return parameters

    def _complete(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        assert self._shards is not None
        found = [
            each if each is None else each.clone(memory_format=torch.contiguous_format) for each in gradients
        ]
        used = {name: each for name, each in zip(names, found, strict=True) if each is not None}
        parts = [(name, used[name]) for name in self._programs.summed if name in used]
        if parts:
            sum_over_tp(parts, self._shards, partial(self._sums.add_up, "tp"))
        self._sums.alike([each for name, each in used.items() if name not in self._shards.pieces])
        return found


class _Completed(torch.autograd.Function):
    """Parameters as they are, and their gradients of all uses in one call, completed together."""

    @staticmethod
    def forward(ctx: Any, complete: Callable[..., Any], *parameters: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.complete = complete
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.complete(gradients)


def keep(tensor: Tensor, shards: Shards, name: str) -> None:
    """Of a parameter or buffer that is whole, and of its gradient, this rank's shard in the same object."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = shards.take(name, tensor.detach())
    if gradient is not None:
        tensor.grad = shards.take(name, gradient)


def _inputs(program: Program, leaves: Leaves) -> list[Tensor]:
    return [tensor_of(leaves, each) for each in program.inputs]


def _job(model: Callable[[], nn.Module], batch_size: int, leaves: Sequence[str | type[nn.Module]]) -> Job:
    """What of a job a capture needs; its losses are forwards."""
    return Job(
        model=model, loss=lambda model, batch: None, optimizer=lambda named: [], data=list, batch_size=batch_size, steps=1, leaves=leaves
    )  # fmt: skip
