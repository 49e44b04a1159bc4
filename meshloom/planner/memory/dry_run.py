"""The chunks of a rank's step on tensors without values: its own stages run, and every storage is followed from the call that makes it to its end.

    F   forward     what comes and goes, and what stays for backward
    B   backward    what comes and goes, gradients that stay, and the end of what forward has left; of halves I and W

One list of bytes for each action of a stage, the first one and later ones, which add to gradients. Along a rank's actions they add up to its peak.
Of identical blocks some are run: what one more of them puts into the lists, every further one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshloom.core.modules.casts import FrozenCasts, cast_of
from meshloom.core.moments.current_step import at_step
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.runtime.run import empty_as
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.stages.stages import Stage
from meshloom.planner.memory.storages import Event, Storages, bytes_of, most_of
from meshloom.program.cost.cost_fake import (
    fake_buffers,
    fake_constants,
    fake_inputs,
    fake_parameters,
    fake_tensors,
)
from meshloom.program.cost.one_rank import Unheard, alone
from meshloom.program.cost.shortened import shortened
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.program import Program
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator, GradBuffer
from meshloom.program.recompute.saved_frame import open_saved

FEW = 4  # blocks that are run of many; and one more
MANY = 8


@dataclass(frozen=True, kw_only=True)
class DryAction:
    """gradients: bytes of parameters' gradients that it leaves, beyond those before it."""

    events: tuple[Event, ...]
    gradients: int = 0

    @property
    def net(self) -> int:
        """Bytes that stay, or end, with it."""
        return sum(size for size, _ in self.events)

    @property
    def kept(self) -> int:
        """Those of them that are no gradients."""
        return self.net - self.gradients


@dataclass(frozen=True, kw_only=True)
class DryChunks:
    """Bytes of a rank's chunks without parameters, buffers and the batch. peaks: kind of action ("F", "B", ...) -> most at one time, and those of them that
    are neither kept for backward nor gradients. kept: most between actions, without gradients, which are `gradients` at the end."""

    peaks: Mapping[str, tuple[int, int]]
    kept: int
    gradients: int

    @property
    def most(self) -> tuple[int, int]:
        """Of all actions."""
        return max(self.peaks.values(), default=(0, 0))


Gradients = Literal["stay", "leave", "add up", "in buckets"]
Actions = Mapping[tuple[str, bool], DryAction]  # by kind and whether it is a stage's first one
_BEGINS = {"F": "F", "B": "BIW", "I": "BI", "W": "BW"}  # kinds that are no stage's first one after it


class DryStages:
    """Of some ranks' programs. ranks: along tp. gradients: they "stay"; "leave" as soon as they are computed; or "add up" over chunks, those of large linear
    layers in place, "in buckets" in memory that is there. in_units: parameters are there for a unit at a time (zero=3), and so are their casts.
    split: weight gradients are computed apart."""

    def __init__(
        self,
        ranks: int = 1,
        rank: int = 0,
        *,
        gradients: Gradients = "stay",
        in_units: bool = False,
        split: bool = False,
    ) -> None:
        self._group = Unheard(ranks, rank)
        self._gradients: Gradients = gradients
        self._in_units, self._split = in_units, split

    def kept(self, stage: Stage) -> int:
        """Bytes from the forward of a microbatch to its backward."""
        return self._found(stage, ("F",), again=False)["F", True].kept

    def chunks(self, stages: Sequence[Stage], actions: Sequence[Action]) -> DryChunks:
        """stages: of a rank, of the largest microbatch. actions: in its order."""
        asked, again = {each.kind for each in actions}, any(each.microbatch > 0 for each in actions)
        orders = [each for each in (("F", "B"), ("F", "I", "W")) if asked & {*each[1:]}] or [("F",)]
        found = {
            each.number: {
                kind: act for order in orders for kind, act in self._found(each, order, again=again).items()
            }
            for each in stages
        }
        begun = set[tuple[int, str]]()
        peaks: dict[str, tuple[int, int]] = {}
        held = kept = gradients = most_kept = 0
        for action in actions:
            each = found[action.stage][action.kind, (action.stage, action.kind) not in begun]
            begun |= {(action.stage, kind) for kind in _BEGINS[action.kind]}
            rise, passing = most_of(each.events)
            peaks[action.kind] = max(peaks.get(action.kind, (0, 0)), (held + rise, passing))
            held, kept, gradients = held + each.net, kept + each.kept, gradients + each.gradients
            most_kept = max(most_kept, kept)
        return DryChunks(peaks=peaks, kept=most_kept, gradients=gradients)

    def _found(self, stage: Stage, kinds: Sequence[str], *, again: bool) -> Actions:
        """again: also later ones, where gradients are left from earlier ones."""
        rounds = (True, False) if again and self._gradients != "leave" else (True,)
        with fake_tensors(), at_step(0), torch.autograd.set_detect_anomaly(False):
            found = self._of(replace(stage, program=_of_what_is_used(stage.program)), kinds, rounds)
        return {**{(kind, False): each for (kind, _), each in found.items()}, **found}

    def _of(self, stage: Stage, kinds: Sequence[str], rounds: Sequence[bool]) -> Actions:
        program = stage.program
        few = shortened(program, FEW) if program.kept is None else None
        more = shortened(program, FEW + 1) if few and few.run.num_blocks > MANY else None
        if few and more:
            one, two = (self._of(replace(stage, program=each.program), kinds, rounds) for each in (few, more))
            found = {each: _extended(one[each], two[each], few.run.num_blocks - FEW) for each in one}
            if all(found.values()):
                return {each: action for each, action in found.items() if action}
        running = _Running(
            stage, self._group, gradients=self._gradients, in_units=self._in_units, split=self._split
        )
        return running.actions(kinds, rounds)


def _of_what_is_used(program: Program) -> Program:
    """Without the parameters of other stages."""
    used = {ref.name for node in program.nodes for ref in node.operands()}
    return replace(
        program, parameters={name: each for name, each in program.parameters.items() if each.value in used}
    )


def _extended(few: DryAction, more: DryAction, times: int) -> DryAction | None:
    """What one block more adds, so often. None: it is no stretch of events."""
    one, two = few.events, more.events
    start = len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))])
    added = len(two) - len(one)
    if added < 0 or two[start + added :] != one[start:]:
        return None
    events = (*one[:start], *two[start : start + added] * times, *one[start:])
    return DryAction(events=events, gradients=few.gradients + (more.gradients - few.gradients) * times)


class _Running:
    """A stage, as the engine runs it."""

    def __init__(
        self, stage: Stage, group: Unheard, *, gradients: Gradients, in_units: bool, split: bool
    ) -> None:
        program = replace(stage.program, constants=fake_constants(stage.program), shared=None)
        self._stage = stage = replace(stage, program=alone(program, None))
        self._device, received = program.device, {each.value for each in stage.incoming}
        self._parameters, buffers = fake_parameters(program), fake_buffers(program)
        inputs = dict(zip([each.name for each in program.inputs], fake_inputs(program), strict=True))
        given = {name: each for name, each in inputs.items() if name not in received}
        batch = Leaves(given, lambda *_: None, {})
        trained = [each for each in self._parameters.values() if each.requires_grad]
        self._buckets = (
            {each: torch.empty_like(each) for each in trained} if gradients == "in buckets" else {}
        )
        standing: Any = (self._parameters, buffers, program.constants, batch.tensors, self._buckets)
        self._storages = Storages(each for tensors in standing for each in tensors.values())
        if gradients == "leave":
            for each in trained:
                each.register_post_accumulate_grad_hook(_forget)
        accumulator = DirectAccumulator(self._bucket) if gradients in ("in buckets", "add up") else None
        self._units = _CastsAnew(self._parameters.values()) if in_units else None
        self._run = ProgramStage(
            [stage],
            self._parameters,
            buffers,
            lambda _: batch,
            finish=None if stage.outgoing else _root,
            group=group,
            split=split,
            accumulator=accumulator,
            elsewhere=self._units,
        )

    def actions(self, kinds: Sequence[str], rounds: Sequence[bool]) -> Actions:
        found: dict[tuple[str, bool], DryAction] = {}
        if self._stage.program.kept is not None:  # the first run finds out what to compute again
            for kind in kinds:
                self._act(kind)
            for each in self._parameters.values():
                each.grad = None
        for first in rounds:
            for kind in kinds:
                before = self._gradients()
                events = self._storages.followed(lambda kind=kind: self._act(kind))
                found[kind, first] = DryAction(events=events, gradients=self._gradients() - before)
        return found

    def _act(self, kind: str) -> None:
        if kind == "F":
            if self._stage.incoming:
                self._run.receive(
                    0, {each.value: empty_as(each.meta, self._device) for each in self._stage.incoming}
                )
            with self._units.saving() if self._units else nullcontext():
                self._run.forward(0)
            return
        if kind != "W" and self._stage.outgoing:
            given = {each.value: each.meta for each in self._stage.outgoing if each.meta.requires_grad}
            self._run.receive_gradients(
                0, {name: empty_as(meta, self._device) for name, meta in given.items()}
            )
        {"B": self._run.backward, "I": self._run.input_gradients, "W": self._run.weight_gradients}[kind](0)

    def _bucket(self, parameter: Any) -> GradBuffer | None:
        found = self._buckets.get(parameter)
        return None if found is None else GradBuffer(tensor=found, filled=False)

    def _gradients(self) -> int:
        """Their bytes, without those in buckets."""
        found = [each.grad for each in self._parameters.values() if each.grad is not None]
        return bytes_of([*self._buckets.values(), *found]) - bytes_of(self._buckets.values())


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _root(_: int, values: Sequence[Any]) -> Tensor | None:
    """Where backward starts: the sum of the loss."""
    loss = values[0] if values else None
    return loss.sum() if isinstance(loss, Tensor) and loss.requires_grad else None


class _CastsAnew:
    """Casts of parameters are not kept for backward, as of parameters that are elsewhere."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(each) for each in parameters}
        self._frozen = FrozenCasts()

    def pack(self, tensor: Tensor) -> Any:
        trained = cast_of(tensor)
        parameter = self._frozen.cast_of(tensor) if trained is None else trained
        if parameter is None or id(parameter) not in self._parameters:
            return tensor
        return _Cast(parameter, tensor.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def watching(self) -> AbstractContextManager[Any]:
        return self._frozen.watching()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context of forwards that compute nothing again; what does packs by itself."""
        with saved_tensors_hooks(self.pack, open_saved), self.watching():
            yield


@dataclass(frozen=True)
class _Cast:
    parameter: Tensor
    dtype: torch.dtype
    layout: tuple[Any, ...]

    def tensor(self) -> Tensor:
        return self.parameter.detach().to(self.dtype).as_strided(*self.layout)
