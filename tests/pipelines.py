"""A loss cut into stages that run as ranks of a pipeline in this process, against the job's own module on one
device.

The oracle is eager: chunks one after another, draws keyed, gradients accumulated. It knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from meshloom.comm.group import Group
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.job import Job
from meshloom.core.random import KeyedDraws, preserved_draws, seed_everything
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.runtime.run import ActionListener, PipelineRun
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.stages import Stage, cut_into_stages
from meshloom.program.capture.capture import capture
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.trace.precision import build_model, default_precision, in_precision

FLOOR = 1e-3  # of the largest gradient's norm: what is smaller is compared with that


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A job, its microbatches, and what its own module makes of them in float64, run one after another."""

    job: Job
    microbatches: Sequence[Any]
    programs: Sequence[Program]  # [microbatch]
    losses: Sequence[float]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


@dataclass(kw_only=True)
class Ran:
    """What a pipeline came to. error: the largest of all losses, gradients and buffers; peaks: [rank] most
    microbatches alive, of all stages."""

    error: float
    what: str
    peaks: list[int]
    sent: list[int]  # [rank] bytes
    crossings: Sequence[Stage] = field(default_factory=list[Stage])


def subject_of(job: Job, microbatches: Sequence[Any], dtype: torch.dtype = torch.float64) -> Subject:
    """Read the job for every shape of its microbatches, and run it as one device does."""
    microbatches = [in_precision(each, dtype) for each in microbatches]
    known: dict[Any, Program] = {}
    programs: list[Program] = []
    for each in microbatches:
        key = tuple((name, tuple(leaf.shape)) for name, leaf in leaves_of(each).tensors.items())
        if key not in known:
            known[key] = capture(job, (each, each), dtype=dtype)
        programs.append(known[key])
    model = build_model(job, dtype, training=True)
    losses: list[float] = []
    with preserved_draws(), default_precision(dtype):
        for number, each in enumerate(microbatches):
            seed_everything(_seed(number))
            with KeyedDraws():
                loss = _first(job.loss(model, each))
            loss.backward()
            losses.append(float(loss))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Subject(
        job=job, microbatches=microbatches, programs=programs, losses=losses, gradients=gradients, buffers=dict(model.named_buffers())
    )  # fmt: skip


def evenly(program: Program, num_stages: int) -> dict[str, int]:
    """As many operators for each stage, whatever they are: through the middle of everything."""
    count = len(program.nodes)
    return {node.name: number * num_stages // count for number, node in enumerate(program.nodes)}


def run_pipeline(
    subject: Subject,
    schedule: Schedule,
    stage_of: Callable[[Program, int], Mapping[str, int]] = evenly,
    listener: Callable[[int], ActionListener] | None = None,
) -> Ran:
    """All ranks in turns; each with a model of its own, of which it uses the parameters of its stages."""
    cut = {
        id(program): cut_into_stages(program, stage_of(program, schedule.num_stages), schedule.num_stages)
        for program in subject.programs
    }
    stages = [cut[id(program)] for program in subject.programs]
    dtype = subject.programs[0].precision
    models = [build_model(subject.job, dtype, training=True) for _ in range(schedule.num_ranks)]
    groups = [RecordedGroup(group, "pp") for group in simulated_groups(schedule.num_ranks)]
    losses = [0.0] * len(stages)
    peaks = [0] * schedule.num_ranks

    def rank(number: int) -> None:
        _run_rank(
            subject,
            schedule,
            stages,
            models[number],
            groups[number],
            losses,
            peaks,
            listener(number) if listener else None,
        )

    with preserved_draws(), default_precision(dtype):  # outside of the threads, which share it
        in_turns([lambda number=number: rank(number) for number in range(schedule.num_ranks)])
    error, what = max(_errors(subject, schedule, stages, models, losses))
    sent = [group.counts["send"].bytes if "send" in group.counts else 0 for group in groups]
    return Ran(error=error, what=what, peaks=peaks, sent=sent, crossings=stages[0])


def _run_rank(
    subject: Subject,
    schedule: Schedule,
    stages: Sequence[Sequence[Stage]],
    model: nn.Module,
    group: Group,
    losses: list[float],
    peaks: list[int],
    listener: ActionListener | None,
) -> None:
    last = schedule.num_stages - 1

    def finish(microbatch: int, returned: Sequence[Any]) -> Tensor:
        loss = _first(tree_unflatten(list(returned), subject.programs[microbatch].out_spec))
        losses[microbatch] = float(loss)
        return loss

    @contextmanager
    def seeded(microbatch: int) -> Iterator[None]:
        seed_everything(_seed(microbatch))
        yield

    runs = {
        stage: ProgramStage(
            [each[stage] for each in stages],
            dict(model.named_parameters()),
            dict(model.named_buffers()),
            lambda microbatch: leaves_of(subject.microbatches[microbatch]),
            finish=finish if stage == last else None,
            split=bool(schedule.split),
            around=seeded,
        )
        for stage in schedule.stages_of(group.rank)
    }
    watch = _Watch(runs, peaks, group.rank, listener)
    crossings = [[crossing for stage in each for crossing in stage.incoming] for each in stages]
    PipelineRun(schedule, group, runs, crossings, torch.device("cpu")).run([watch])
    assert not any(run._live for run in runs.values()), "activations are left"


class _Watch:
    def __init__(
        self, runs: Mapping[int, ProgramStage], peaks: list[int], rank: int, listener: ActionListener | None
    ) -> None:
        self._runs, self._peaks, self._rank, self._listener = runs, peaks, rank, listener
        self._forwards = set[tuple[int, int]]()  # stages and microbatches

    def began(self, action: Any) -> None:
        if self._listener:
            self._listener.began(action)

    def ended(self, action: Any) -> None:
        if action.kind == "F":
            self._forwards.add((action.stage, action.microbatch))
        live = {(stage, microbatch) for stage, run in self._runs.items() for microbatch in run._live}
        self._peaks[self._rank] = max(self._peaks[self._rank], len(live & self._forwards))
        if self._listener:
            self._listener.ended(action)


def _errors(
    subject: Subject,
    schedule: Schedule,
    stages: Sequence[Sequence[Stage]],
    models: Sequence[nn.Module],
    losses: Sequence[float],
) -> Iterator[tuple[float, str]]:
    yield 0.0, "nothing"
    for number, (mine, theirs) in enumerate(zip(losses, subject.losses, strict=True)):
        yield abs(mine - theirs) / max(abs(theirs), 1e-30), f"the loss of microbatch {number}"
    floor = FLOOR * max(
        (float(each.norm()) for each in subject.gradients.values() if each is not None), default=0.0
    )
    named = [dict(model.named_parameters()) for model in models]
    for name, theirs in subject.gradients.items():
        parts = [gradient for each in named if (gradient := each[name].grad) is not None]
        users = {
            schedule.ranks[stage.number] for each in stages for stage in each if name in stage.parameters
        }
        for rank, each in enumerate(named):
            if each[name].grad is not None and rank not in users:
                yield float("inf"), f"rank {rank} has a gradient of {name}, which none of its stages uses"
        if theirs is None or not parts:
            yield 0.0 if theirs is None and not parts else float("inf"), f"whether {name} has a gradient"
        else:
            mine = torch.stack(parts).sum(0)
            yield (
                float((mine - theirs).norm()) / max(float(theirs.norm()), floor, 1e-300),
                f"the gradient of {name}",
            )
    program = subject.programs[0]
    for name, theirs in subject.buffers.items():
        variable = program.buffers.get(name)
        if variable is None or (name not in program.updates and name not in program.in_place):
            continue
        holder = next(
            stage.number
            for stage in stages[0]
            if name in stage.program.updates or name in stage.program.in_place
        )
        mine = dict(models[schedule.ranks[holder]].named_buffers())[name]
        yield (
            float((mine.double() - theirs.double()).norm()) / max(float(theirs.double().norm()), 1e-30),
            f"buffer {name}",
        )


def _first(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def _seed(microbatch: int) -> int:
    return 1000 + microbatch
