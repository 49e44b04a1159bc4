"""Tensor and pipeline parallel: the module's forward is captured at its first call, divided and cut into stages; each rank keeps its share of the
parameters, runs its part of the program, and gets whole results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshloom.comm.objects import on_rank_0, scatter_objects
from meshloom.comm.simulated import simulated_groups
from meshloom.core.buffer_rules import BufferRule
from meshloom.core.errors import CaptureError, TrainingError
from meshloom.core.job import Job, LossFunction
from meshloom.core.modules.compiled import without_compilation
from meshloom.core.modules.named_leaves import modules_of
from meshloom.core.random import preserved_draws_of_devices
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.captured_forward import CapturedForward, autocast_here, named_inputs, results
from meshloom.loops.copied_module import copied, refusal_of_graphs
from meshloom.loops.execution import Cutting
from meshloom.loops.gathering import Gatherer
from meshloom.loops.gradient_mean import AveragedExecution
from meshloom.loops.left_values import Left, LeftValues, left_by
from meshloom.loops.module_share import ModuleShare
from meshloom.loops.part_tensor import PartTensor, plain
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import bind, is_alike
from meshloom.pipeline.runtime.microbatches import LiveBuffers
from meshloom.pipeline.stages.program_store import MOST_KEPT, ProgramStore, ReadyBatch
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.capture.attempted import attempted
from meshloom.program.capture.guarded_values import GuardedValue, check_step
from meshloom.program.capture.guards import Guards
from meshloom.program.capture.restored import cloned
from meshloom.program.ir.batch_values import tensor_of
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import keep_as_constants
from meshloom.program.opaque.bound import bound
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.operators.collectives import refuse_second_derivative
from meshloom.program.run.execute import run_flat
from meshloom.program.store.fifo_cache import FifoCache
from meshloom.program.store.program_key import ProgramKey
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.buffers.norm_statistics import decays
from meshloom.replica.gradient_completion import sum_over_tp
from meshloom.replica.team_sums import TeamSums
from meshloom.tensor_parallel.division import Division

Check = Callable[[Callable[[], nn.Module]], None]
MOST_CHANGES = 16  # of plain values that the forward reads, each of which is captured anew


class DividedModule(AveragedExecution):
    """`module` on the ranks along tp and pp. leaves: modules that run as written. rules: of its buffers (docs/contract.md). batch: inputs by name -> the
    dim that microbatches cut, as of `microbatches_of`."""

    def __init__(
        self, module: nn.Module, ranks: LoopRanks, leaves: Sequence[str | type[nn.Module]] = (), rules: Mapping[str, BufferRule] | None = None,
        batch: Mapping[str, Cutting] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(ranks)
        self._module, self._ranks, self._rules = module, ranks, rules or {}
        self._modules, self._parameters = list(module.modules()), dict(module.named_parameters())
        self._buffers = LiveBuffers(module)
        plan, self._batch = ranks.plan, batch or {}
        self._group = ranks.own.groups["tp"] if plan.tp > 1 else simulated_groups(1)[0]
        self._pp = ranks.own.groups["pp"] if plan.pp > 1 else simulated_groups(1)[0]
        self._team = ranks.own.team or simulated_groups(1)[0]
        self._sums = TeamSums(None, self._group)
        limits: Any = {"memory_bytes": plan.memory_bytes or None, "num_stages": plan.pp}
        self._division = (
            Division(self._group, placements=plan.tp_placements, **limits) if plan.tp > 1 else None
        )
        self._programs = ProgramStore(
            _job(self._copy_of_copy, plan.num_chunks, leaves), plan, self._team, self._division
        )
        self._captures = False
        self._copy: nn.Module | None = None  # whole, on the replica's first rank, while a forward is captured
        self._gatherer = Gatherer(ranks.replicas, keeps=True) if plan.zero else None
        among = ranks.everyone if plan.zero else self._team
        self._share = ModuleShare(module, self._group, self._pp, among, self._gatherer)
        self._weight = 1.0  # of the newest call, where replicas divide shares
        self._guards: dict[CapturedForward, list[GuardedValue]] = {}
        self._changes = 0
        self._statistics: dict[CapturedForward, dict[int, RunningStatistics]] = {}  # by stage
        self._bound: dict[int, tuple[Program, Program]] = FifoCache(MOST_KEPT)  # with their leaves' modules
        self._draws = CallDraws(ranks.replica)
        self._trained: tuple[bool, ...] = ()  # of which gradients are averaged over replicas
        self._notes: list[str] = []
        self._left = LeftValues(module)
        self._is_whole = False  # within `whole`
        self._made_of = list(_made_of(module))
        self._constants = list(_constants(module))

    def call(
        self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward"
    ) -> Any:  # fmt: skip
        if self._is_whole:
            with torch.no_grad(), self._left.as_written():  # nobody would divide a gradient
                return compute(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # whose tensors no capture takes, nor a later training
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = tree_map(_of_training, (args, kwargs))
                return self.call(compute, args, kwargs, method)
        positional, batch = named_inputs(getattr(self._module, method), args, kwargs)
        share, forward = bind((args, kwargs)), self._forward(positional, batch, method=method)
        self._weight = share.weight if share else 1.0
        found = self._run(forward, batch)
        if forward.graded is not None:
            self.mean.follow(found, share)
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        before, self._is_whole = self._is_whole, True
        try:
            with nullcontext() if before else self._share.whole(gradients=True):
                yield
        finally:
            self._is_whole = before

    @property
    def is_whole(self) -> bool:
        return self._is_whole

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        return self._share.tensors()

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        named = ((name, self._parameters[name]) for name in self._replicated)
        return ((name, each) for name, each in named if not isinstance(each, PartTensor))

    def check_complete(self) -> None:
        super().check_complete()
        if self._share.is_whole and any(each.grad is not None for each in self._parameters.values()):
            name = type(self._module).__name__
            raise TrainingError(
                f"The optimizer steps {name}, whose own call has not run in training, so that {self._ranks.plan} divides nothing of it. Call {name} itself, "
                'name the method that trains, as in parallel(methods=["decode"]), or use a plan with dp and zero alone, which run any method.'
            )

    def _check_made_of(self) -> None:
        if found := next(
            (name for name, held, key, each in self._made_of if held.get(key) is not each), None
        ):
            raise TrainingError(
                f"{type(self._module).__name__} has another {found} than when it was made parallel, and {self._ranks.plan} would not compute with it. Exchange modules, "
                "parameters and forwards before ml.parallel(), change values of parameters in place (under no_grad, or by load_state_dict), or use a plan with dp and "
                "zero alone."
            )

    def take_notes(self) -> list[str]:
        found, self._notes = self._notes, []
        merged = (each for of_forward in self._statistics.values() for each in of_forward.values())
        return [*found, *(note for each in merged for note in each.take_notes())]

    def _forward(
        self, positional: tuple[str, ...], batch: Any, loss: LossFunction | None = None, method: str = "forward"
    ) -> CapturedForward:  # fmt: skip
        """What the module, or a loss of it, computes now. What it reads besides tensors may have changed since a capture: it is another one then."""
        self._check_made_of()
        tensors = leaves_of(batch).tensors
        if sparse := [name for name, each in tensors.items() if each.layout != torch.strided]:
            raise CaptureError(
                f"{type(self._module).__name__} is given a sparse tensor ({sparse[0]}), which no program takes. Give it dense, or use a plan with dp and zero alone."
            )
        graded = tuple(name for name, each in tensors.items() if each.requires_grad)
        found = CapturedForward(
            training=tuple(each.training for each in self._modules),
            trained=tuple(each.requires_grad for each in self._parameters.values()),
            graded=graded if torch.is_grad_enabled() else None,
            autocast=autocast_here(),
            positional=positional,
            changes=self._changes,
            loss=loss,
            method=method,
        )
        try:
            if self._left.script_has_set():
                self._changes += 1
                return self._forward(positional, batch, loss, method)
            if named := next(
                (name for name, held, key, each in self._constants if held.get(key) is not each), None
            ):
                self._constants = list(_constants(self._module))
                raise TrainingError(
                    f"{named} was another tensor in each of {MOST_CHANGES} calls, and {self._ranks.plan} captures the forward anew for each. Make it an "
                    "input, or a buffer that is changed in place."
                )
            check_step(self._guards.get(found, ()))
        except TrainingError:
            if self._changes == MOST_CHANGES:
                raise
            self._changes += 1
            return self._forward(positional, batch, loss, method)
        return found

    def _ready(
        self, forward: CapturedForward, batch: Any, parts: Sequence[Any], check: Check | None = None
    ) -> tuple[list[ReadyBatch], Any]:  # fmt: skip
        """The parts of a batch with their programs, and the key of what the forward leaves. check: of copies of the whole module, before a forward's
        first capture."""
        training, shares = self._module.training, self._share.shares()
        if shares:  # by all replicas, of which one may have to capture
            shares.wholes()
        follows = all(self._programs.follows(each, loss=forward, training=training) for each in parts)
        with nullcontext() if follows else self._capturing():
            ready = [self._part_ready(forward, each, check) for each in parts]
            key = tuple(each.key for each in ready), leaves_of(batch).shapes
            if not self._left.has(key):
                if (
                    follows and not self._left.known
                ):  # sizes alone are new: the forward goes the ways that it went
                    self._left.add(key, Left({}, {}))
                else:
                    self._left.add(key, self._left_by(forward, batch, ready[0].key))
                    found = Guards(forward, self._module, self._programs.opaque).values
                    self._guards[forward] = [each for each in found if not self._left.sets(key, each.at)]
        return ready, key

    def _part_ready(self, forward: CapturedForward, batch: Any, check: Check | None) -> ReadyBatch:
        """The first program decides what ranks keep, and all ranks make it together; further ones those of a replica."""
        training = self._module.training
        if not self._programs.has(batch, loss=forward, training=training):
            like = cloned(batch)
            with self._capturing(), forward.alone():
                if forward not in self._statistics and check:
                    on_rank_0(self._team, lambda: check(self._copy_of_copy), CaptureError)
                if self._share.is_whole:
                    self._programs.open(
                        [like],
                        self._ranks.everyone,
                        self._copy_of_copy()
                        if self._copy
                        else self._module,  # a capture leaves new attributes there
                        loss=forward,
                        training=training,
                    )
                ready = self._programs.ready(like, loss=forward, training=training)
            if self._share.is_whole:
                holders = self._programs.cutter.holders if self._pp.size > 1 else {}
                self._share.keep(self._programs.pieces, holders)
                self._notes += self._programs.opaque_notes()
            merged = {each.number: self._statistics_of(each.program) for each in self._own_stages(ready)}
            self._statistics.setdefault(forward, merged)
            self._follow(forward.trained)
        return self._programs.ready(batch, loss=forward, training=training)

    def _left_by(self, forward: CapturedForward, batch: Any, key: ProgramKey) -> Left:
        """But for what its leaves leave, whose own code runs."""
        others = {each[0]: each[1] for each in key.shapes if len(each) == 2}
        stages = self._programs.stages(key)
        own = {str(node.args[2]) for each in stages for node in each.program.nodes if is_opaque(node)}
        with self._capturing(), forward.alone():
            found = on_rank_0(
                self._team,
                lambda: left_by(
                    self._copy or self._module, forward, batch, others, self._left, modules_of(own)
                ),
                CaptureError,
            )
        return scatter_objects(self._team, [found] * self._team.size if found else None)

    def _own_stages(self, ready: ReadyBatch) -> list[Stage]:
        ranks = self._programs.cutter.ranks
        return [each for each in self._programs.stages(ready.key) if ranks[each.number] == self._pp.rank]

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """A context in which the replica's first rank has a copy of the module, whole, which no hooks of parameters see. What it computes with
        the copy draws nothing that the script would."""
        if self._captures:
            yield
            return
        self._captures = True
        with self._share.whole(gradients=False):
            self._copy = on_rank_0(self._team, self._whole_copy, CaptureError)
        try:
            with preserved_draws_of_devices():
                yield
        except CaptureError as error:
            error.args = (str(error).replace("Job(", "parallel("),)
            raise
        finally:
            self._copy, self._captures = None, False

    def _whole_copy(self) -> nn.Module:
        found, refused = attempted(lambda: copied(self._module, {id(self): self}))
        if found is None:
            why = refusal_of_graphs(self._module) or refused
            raise CaptureError(f"The module cannot be copied to capture its forward: {why}") from refused
        without_compilation(found)
        return keep_as_constants(self._left.take_back(found))

    def _copy_of_copy(self) -> nn.Module:
        assert self._copy is not None
        return copied(self._copy, {})

    def _statistics_of(self, program: Program) -> RunningStatistics:
        """Of the buffers that it changes."""
        kept, named = decays(program.nodes), {each.value: name for name, each in program.buffers.items()}
        return RunningStatistics(
            self._module, self._ranks.replicas, num_chunks=self._ranks.plan.microbatches, rules=self._rules, changing=program.changing,
            decays={named[value]: each for value, each in kept.items() if value in named},
            opaque=[str(node.args[2]) for node in program.nodes if is_opaque(node)],
        )  # fmt: skip

    def _follow(self, trained: tuple[bool, ...]) -> None:
        """Parameters may have been frozen and unfrozen since the last call."""
        if self._ranks.plan.dp == 1 or self._gatherer or trained == self._trained:
            return
        named = {
            name: each
            for name, each in self._parameters.items()
            if each.requires_grad and self._share.holds(name)
        }
        self.mean.open(named, replicated=[name for name in self._replicated if name in named])
        self._trained = trained

    def _run(self, forward: CapturedForward, batch: Mapping[str, Any]) -> Any:
        """The results. A backward may need a buffer as this forward saw it, and other forwards come in between."""
        (ready,), left = self._ready(forward, batch, [batch])
        self._follow(forward.trained)
        (stage,) = self._own_stages(ready)
        program, statistics = self._bind(stage.program), self._statistics[forward][0]
        changed = {name: self._buffers[name].clone() for name in program.changing}
        inputs = [tensor_of(ready.leaves, each) for each in program.inputs]
        draws = self._draws.of_a_call() if any(node.num_draws for node in program.nodes) else nullcontext()
        with statistics.chunk(), draws:
            values = run_flat(
                program, self._completed(), {**self._buffers, **changed}, inputs, group=self._group
            )
            with torch.no_grad():
                for name, value in changed.items():
                    self._buffers[name].copy_(value)
        statistics.finish(alike=statistics.merges and is_alike(self._ranks.replicas, batch))
        self._left.put(left)
        return results(values, stage.returned)

    def _bind(self, program: Program) -> Program:
        """With the modules of its leaves."""
        if id(program) not in self._bound:
            self._bound[id(program)] = program, bound(program, self._module)
        return self._bound[id(program)][1]

    @property
    def _replicated(self) -> list[str]:
        """Names of the parameters that ranks along tp have whole."""
        return [name for name in self._parameters if name not in self._share.shards.pieces]

    def _completed(self) -> dict[str, Tensor]:
        """The parameters. Gradients of those that several ranks along tp have arrive at them summed over ranks that computed parts, and alike."""
        parameters: dict[str, Tensor] = {
            name: plain(each) if isinstance(each, PartTensor) else each
            for name, each in self._parameters.items()
        }
        if shares := self._share.shares():
            shares.weight = self._weight
            wholes = dict(zip(shares.parameters, shares.with_graph(), strict=True))
            parameters |= {
                name: wholes.get(each, parameters[name]) for name, each in self._parameters.items()
            }
        candidates = (
            dict.fromkeys([*self._programs.summed, *self._replicated]) if self._group.size > 1 else ()
        )
        names = [name for name in candidates if parameters[name].requires_grad and self._share.holds(name)]
        if names and torch.is_grad_enabled():
            completed: Any = _Completed.apply(
                partial(self._complete, names), *(parameters[name] for name in names)
            )
            parameters.update(zip(names, completed, strict=True))
        return parameters

    def _complete(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        found = [
            each if each is None else each.clone(memory_format=torch.contiguous_format) for each in gradients
        ]
        used = {name: each for name, each in zip(names, found, strict=True) if each is not None}
        parts = [(name, used[name]) for name in self._programs.summed if name in used]
        if parts:
            sum_over_tp(parts, self._share.shards, partial(self._sums.add_up, "tp"))
        self._sums.alike([used[name] for name in self._replicated if name in used])
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
        refuse_second_derivative()
        return None, *ctx.complete(gradients)


def _made_of(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str, Any]]:
    """What its program was, or will be, captured of: the name of each part, and the entry that it is."""
    for path, each in module.named_modules():
        for held in (vars(each)["_parameters"], vars(each)["_modules"]):
            for name, part in held.items():
                yield f"{path}.{name}".lstrip("."), held, name, part
        yield f"{path}.forward".lstrip("."), vars(each), "forward", vars(each).get("forward")


def _constants(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str, Tensor]]:
    """The same of tensors that are plain attributes, which its program keeps."""
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), vars(each), name, value


def _of_training(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _job(model: Callable[[], nn.Module], batch_size: int, leaves: Sequence[str | type[nn.Module]]) -> Job:
    """What of a job a capture needs. Its losses are forwards."""
    return Job(
        model=model, loss=_no_loss, optimizer=lambda named: [], data=list, batch_size=batch_size, steps=1, leaves=leaves
    )  # fmt: skip


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("a forward takes its place")
