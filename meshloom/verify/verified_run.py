"""The run that is verified: the ordinary Trainer's, interrupted and resumed, whose steps and what lies between them are compared
with one device.

    steps 0 .. n-3, an evaluation, a checkpoint | resumed: steps n-2 and n-1, then the last step of an epoch and the first of the next

Where a loss scale is too large for an update in any of the first steps, more of them are taken.

`quick`: the steps alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from meshloom.comm.objects import collect
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.parameters.file_weights import build_filled_model
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import why_not_saved
from meshloom.telemetry.progress import Listener
from meshloom.train.contract import Batch
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.between_steps.saving_again import (
    best_saved,
    of_first_rank,
    save_in_background,
    saved_after_resuming,
    saved_again,
    saved_into,
    saving_directory,
)
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.findings import Report
from meshloom.verify.lockstep_check import first_wrong_operator
from meshloom.verify.plan_evaluation import checked_evaluation, steps_schedulers_apart
from meshloom.verify.reference.samples_of_epoch import batches_of_first_epoch
from meshloom.verify.stage_outputs import Values, values_of_modules
from meshloom.verify.step_observer import StepObserver

_MOST_SAMPLES, _MOST_SECONDS = 4096, 5.0  # of iterable data, to find the end of its first epoch
_MOST_SKIPPED = 24  # steps further, until a loss scale has fallen so far that a first update is made
Shares = Sequence[tuple[int, tuple[int, ...]]]
Compare = Callable[..., ComparisonRun]  # begins a comparison with a `Reference` of these arguments
# moments of steps, as what follows "from step 3 on"
_RESUMED = ", after resuming the checkpoint"
_NEXT_EPOCH = ", at the end of an epoch"


@dataclass(kw_only=True)
class VerifiedRun:
    """Of `job` under `plan`. dtype: of both sides; None: the job's own.
    settings: of every Trainer. compare: where one device is. share: whether replicas may have one copy of the parameters.

    report, between, operator, module, moment: on rank 0, what came of it. digest: of what ran. devices: one line about them. owned: the
    share of the trainable elements that each rank updates. notes: on what was left out.
    """

    job: Job
    plan: Plan
    shares: Shares
    dtype: torch.dtype | None
    settings: dict[str, Any]
    compare: Compare
    share: bool = True
    comparison: ComparisonRun | None = None
    report: Report | None = None
    between: list[BetweenSteps] = field(default_factory=list[BetweenSteps])
    operator: str = ""  # of `_place_of`
    module: str = ""
    moment: str = ""  # in the run, of a step that differs
    owned: Sequence[float] = ()
    digest: str = ""
    devices: str = ""
    notes: list[str] = field(default_factory=list[str])
    _steps_per_epoch: int | None = None

    def take(self, steps: int, *, quick: bool) -> None:
        """So many steps, or more where there is something between them."""
        if quick:
            with self._opened(steps) as trainer:
                self._take(trainer, range(steps))
        else:
            # the second one after resuming is the first whose learning rate the schedule computes
            self._whole(max(steps, 3))
        if self.comparison:
            self.report = self._reported(self.comparison.result())
        self.comparison = None  # lets go of one device

    def _whole(self, steps: int) -> None:
        total = max(self.job.steps, steps, 4)  # averages take one step more
        with ExitStack() as around:
            with self._opened(total) as trainer:
                averages = trainer.replicas[0].updater.state.averages is not None
                steps = max(steps, 4) if averages else steps  # in the first step averages are the parameters
                if not self._take_until_updated(trainer, steps - 2, total):
                    return
                after = range(trainer.next_step, trainer.next_step + 2)
                directory = around.enter_context(saving_directory(trainer))
                ends = self._further_steps(trainer, after.stop, total)
                lacking = of_first_rank(trainer, why_not_saved(trainer.replicas[0].model))
                if not self._evaluate(trainer, None if lacking else directory, last=True):
                    return
                if lacking:
                    self.notes.append(f"nothing was saved and resumed: {lacking}")
                    _ = self._take(trainer, after) and self._take(trainer, ends, moment=_NEXT_EPOCH)
                    return
                path = self._saved(trainer, directory)
            del trainer  # before the next one needs as much memory
            with self._opened(total, resume=path) as trainer:
                passed = resumed = self._take(trainer, after, moment=_RESUMED)
                if passed and averages:
                    passed = self._evaluate(trainer)
                passed = passed and self._take(trainer, ends, moment=_NEXT_EPOCH)
                compare = self.comparison and self.comparison.check_saved
                self.between += saved_after_resuming(trainer, path, compare) if passed else []
            del trainer
            if not resumed:
                again = saved_again(self._opened(total, resume=path), path)
                self.between += [] if again.passed else [again]
            elif passed and self.devices.startswith("simulated") and self.plan.mesh.size > 1:
                elsewhere = replace(self, plan=Plan(precision=self.plan.precision), shares=())
                self.between.append(saved_again(elsewhere._opened(total, resume=path), path, "dp=1"))

    def _reported(self, report: Report) -> Report:
        """With what is known here."""
        # what is resumed from a wrong checkpoint is wrong where that is
        wrong = [
            each for each in self.between if self.moment and not each.passed and "checkpoint" in each.what
        ]
        module = (wrong[0].first_module if wrong else None) or self.module
        wrong_step = report.first_wrong if module else None
        steps = [replace(each, first_module=module) if each is wrong_step else each for each in report.steps]
        own = "as `meshloom train` prints it for this job and plan"
        other = "and training in the job's own precision may have another"
        ran = f"what ran has digest {self.digest}, {own if self.dtype is None else other}"
        return replace(
            report, devices=self.devices, owned=self.owned, operator=self.operator, moment=self.moment, digest=self.digest,
            steps=steps, notes=[*report.notes, *self.notes, ran], between=self.between
        )  # fmt: skip

    @contextmanager
    def _opened(self, steps: int, *, resume: Path | None = None) -> Iterator[Trainer]:
        gc.collect()  # a Trainer before this one, which lies in cycles
        quiet = Listener(started=lambda text: None)  # the report describes the run
        with Trainer(
            self.job, self.plan, steps=steps, dtype=self.dtype, share=self.share, listener=quiet, recorded_shares=self.shares, resume=resume,
            **self.settings
        ) as trainer:  # fmt: skip
            self.owned, self.devices = trainer.together(_owned)[0], trainer.world.why
            assert trainer.synchronous is not None
            self.digest = trainer.synchronous.digest
            yield trainer

    def _take(self, trainer: Trainer, numbers: Sequence[int], moment: str = "") -> bool:
        """Take the steps of these numbers, and compare them. Whether all agree, on every rank. moment: of the run, which they are
        at."""
        run, first = trainer.synchronous, trainer.replicas[0]
        assert run is not None
        if trainer.world.main and self.comparison is None:
            self.comparison = self.compare(
                self.job, first.inner, self.dtype, first.context.device, self.shares
            )
        comparison = self.comparison
        observers = [StepObserver(each, comparison if each is first else None, alone=len(trainer.replicas) == 1) for each in trainer.replicas]  # fmt: skip
        run.observe(observers)
        with ExitStack() as attached:
            for observer in observers:
                attached.enter_context(observer.attached())
            batches = attached.enter_context(closing(cast(Any, trainer.batches())))
            batch = None
            for number in numbers:
                if moment == _NEXT_EPOCH and number != run.next_step:
                    run.next_step = number
                    if comparison:
                        comparison.go_to(number)
                batch = next(batches)
                trainer.step(batch)
                if first.engine.stages.cut and not _agrees(trainer, comparison):
                    break
            self._steps_per_epoch = run.data.steps_per_epoch
        run.observe([None] * len(observers))
        passed = _agrees(trainer, comparison)
        if not passed and batch:
            self.moment = moment
            self.operator, self.module = _place_of(trainer, comparison, batch, self.dtype)
        return passed

    def _evaluate(self, trainer: Trainer, into: Path | None = None, *, last: bool = False) -> bool:
        """Whether an evaluation changes nothing, on every rank; that is so where there is none. Steps agree or not whatever its
        metrics are. into, last: of `checked_evaluation`."""
        checked, unchanged = checked_evaluation(trainer, self.comparison, into, last=last)
        self.between += checked
        return of_first_rank(trainer, unchanged)

    def _take_until_updated(self, trainer: Trainer, steps: int, total: int) -> bool:
        """Take the first `steps`, and more as long as a loss scale is too large for every update, of a run of `total`; two remain."""
        passed = self._take(trainer, range(steps))
        last = min(total - 2, steps + _MOST_SKIPPED)
        while passed and trainer.next_step < last and _has_skipped_all(trainer, self.comparison):
            passed = self._take(trainer, [trainer.next_step])
        return passed

    def _further_steps(self, trainer: Trainer, first: int, steps: int) -> list[int]:
        """Steps from `first` on, of a run of `steps`: the last one of an epoch and the first of the next. Of iterable data
        rank 0 counts the first epoch, if it does not take long, and no more samples than that are passed over."""
        length = self._steps_per_epoch
        if length is None:
            most = _MOST_SAMPLES, _MOST_SECONDS
            counted = batches_of_first_epoch(self.job, *most) if trainer.world.main else None
            length = of_first_rank(trainer, counted)
        if not length:
            return []
        end = length * (first // length + 1)
        if self._steps_per_epoch is None or end >= steps:
            end = length  # the other epochs' are not known
        return [step for step in (end - 1, end) if first <= step < steps]

    def _saved(self, trainer: Trainer, directory: Path) -> Path:
        """The checkpoint after the evaluation, compared; with schedulers that go by a metric as one device has them."""
        run = trainer.synchronous
        assert run is not None and run.saved is not None
        path = run.saved
        if steps_schedulers_apart(trainer):
            path = saved_into(trainer, directory / "stepped")
        if self.comparison:
            self.between.append(self.comparison.check_saved(path, "the checkpoint"))
            self.between += best_saved(directory, path, run.evaluation)
        if self.job.checkpoint == "background" and self.plan.synchronous:
            checked, path = save_in_background(trainer, directory / "background", path)
            self.between.append(checked)
        return path


def _place_of(
    trainer: Trainer, one: ComparisonRun | None, batch: Batch, dtype: torch.dtype | None
) -> tuple[str, str]:
    """The operator, in a sentence, and the first module, after the step of `batch`, which differs; on rank 0. "": none was looked for, or is wrong. All
    ranks call it."""
    first = trainer.replicas[0]
    stages, device, job = first.engine.stages, first.context.device, first.job

    def values_again(replica: Replica) -> dict[int, list[Values]]:
        adopt = one.adopt if one and replica is first else lambda name, ours: None
        return values_of_modules(replica, batch.shares[trainer.replicas.index(replica)], adopt)

    runs_programs = stages.cut and not first.plan.sync_batch_norm and not first.inner.compiles
    values = trainer.together(values_again)[0] if runs_programs else None
    if one is None:
        return "", ""
    module = (one.place(values) if values is not None else None) or ""
    wrong_step = one.result().first_wrong
    followed = module or (wrong_step and (wrong_step.failed("gradient") or wrong_step.failed("loss")))
    if stages.division is None or not followed:
        return "", module
    (batch_of_chunk,) = first_batches(job, 1, first.plan.largest_share(job.batch_size)[0])
    model = build_filled_model(job, device, dtype)
    example = to_device(batch_of_chunk, device, dtype)
    operator, of_operator = first_wrong_operator(stages.division.first, model, example)
    return operator, of_operator or module


def _agrees(trainer: Trainer, one: ComparisonRun | None) -> bool:
    """Whether all steps so far agree, on every rank."""
    return of_first_rank(trainer, one is None or one.agrees())


def _has_skipped_all(trainer: Trainer, one: ComparisonRun | None) -> bool:
    """Whether no step so far has made an update, on every rank."""
    return of_first_rank(trainer, one is not None and all(each.skipped for each in one.result().steps))


def _owned(replica: Replica) -> list[float]:
    """The share of the trainable elements that each rank updates."""
    mine = sum(part.stop - part.start for part in replica.exchange.ownership.owned)
    return collect(replica.context.world, mine / replica.num_trainable)
