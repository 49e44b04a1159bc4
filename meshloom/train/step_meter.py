"""Time and traffic of a run's steps on this process's first rank, for progress lines and the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from meshloom.comm.objects import collect
from meshloom.comm.recording import Count
from meshloom.core.device.readback import Readback
from meshloom.core.job import Job
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.replica.expected_bytes import expected_bytes
from meshloom.telemetry.progress import Progress
from meshloom.telemetry.step_result import StepResult
from meshloom.telemetry.summary import Summary, time_shares
from meshloom.telemetry.traffic import Traffic
from meshloom.train.local_replicas import LocalReplicas


class ProgressLines:
    """Lines of progress, in order: a context manager that tells all of them. A gradient's norm that a device has still to compute is told after the next step, whose
    loss the host waits for anyway."""

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        self._tell = tell
        self._held: list[tuple[Progress, Readback | None]] = []

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.tell()

    def add(self, progress: Progress, norm: Readback | None) -> None:
        """After a step. norm: of its gradient."""
        self.tell()
        self._held.append((progress, norm))
        if norm is None or not norm.waits:
            self.tell()

    def tell(self) -> None:
        """All that are held."""
        held, self._held = self._held, []
        for progress, norm in held:
            self._tell(progress if norm is None else replace(progress, gradient_norm=float(norm.values())))


class StepMeter:
    """Made when all ranks are ready: their clocks start together. `checks`, `evaluations`: how many there
    were, which send bytes too. `reading`, `stepping`: seconds of getting batches, and of steps."""

    def __init__(self, job: Job, plan: Plan, replicas: LocalReplicas) -> None:
        self._job, self._plan, self._replicas = job, plan, replicas
        self.num_steps = self.checks = self.evaluations = 0
        self._results: list[StepResult] = []  # the first and the newest
        self._num_samples = 0
        self._start = time.monotonic()
        self.reading = self.stepping = 0.0
        self._elsewhere = self._seconds_in_collectives()  # those of no step

    def add(self, result: StepResult, seconds: float) -> None:
        """A step, and what it came to."""
        self._results[1:] = [result]
        self._num_samples += result.samples
        self.stepping += seconds
        self.num_steps += 1

    @contextmanager
    def between_steps(self) -> Generator[None]:
        """Around what has collectives that are of no step."""
        before = self._seconds_in_collectives()
        yield
        self._elsewhere += self._seconds_in_collectives() - before

    @property
    def newest(self) -> StepResult:
        """The newest step's."""
        return self._results[-1]

    def progress(self, step: int, steps: int, *, memory_bytes: int, saving: float | None) -> Progress:
        """After `step` of `steps`, without the gradient's norm."""
        seconds = max(self.stepping + self.reading, 1e-9)
        samples = self._num_samples / seconds
        return Progress(
            step=step,
            steps=steps,
            loss=self.newest.loss,
            gradient_norm=None,
            learning_rates=self._replicas.first.updater.learning_rates(),
            samples_per_second=samples,
            tokens_per_second=samples * self._job.tokens_per_sample if self._job.tokens_per_sample else None,
            seconds_left=seconds / self.num_steps * (steps - step),
            memory_bytes=memory_bytes,
            logged=self.newest.logged,
            loss_scale=self._replicas.first.sums.scale,
            saving=saving,
        )

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """Bytes and seconds of the steps so far. All ranks call it."""
        context = self._replicas.first.context
        counted = Traffic.of(
            {"dp": self._counts()} | {axis: context.groups[axis].counts for axis in self._axes_within}
        )
        arrivals = self._replicas.together(
            lambda each: collect(each.context.world, [at - self._start for at in each.arrivals])
        )[0]
        return Summary(
            steps=self.num_steps,
            seconds=seconds,
            first_loss=self._results[0].loss if self._results else math.nan,
            last_loss=self.newest.loss if self._results else math.nan,
            evaluation=evaluation,
            predicted=expected_bytes(self._replicas.first)
            .after(steps=self.num_steps, checks=self.checks, evaluations=self.evaluations)
            .over(["dp", *self._axes_within]),
            counted=counted,
            shares=time_shares(
                self.stepping + self.reading,
                self.reading,
                self._seconds_in_collectives() - self._elsewhere,
                arrivals,
                context.rank,
                self.num_steps,
            ),
            checkpoint=checkpoint,
            compiled=compiler.report if (compiler := self._replicas.first.engine.stages.compiler) else None,
            scale=self._replicas.first.sums.scale,
        )

    def _counts(self) -> dict[str, Count]:
        """What this process's first rank handed to collectives along dp, by kind."""
        context = self._replicas.first.context
        parts = (context.slices.copy, context.slices.equals) if context.slices else ()
        counts = dict(context.groups["dp"].counts)
        for group in (context.statistics, *parts):
            for name, count in group.counts.items():
                counts[name] = counts[name] + count if name in counts else count
        return counts

    def _seconds_in_collectives(self) -> float:
        groups = self._replicas.first.context.groups
        within = [count for axis in self._axes_within for count in groups[axis].counts.values()]
        return sum(count.seconds for count in (*self._counts().values(), *within))

    @property
    def _axes_within(self) -> list[Axis]:
        """The axes along which a replica is divided."""
        return [axis for axis in ("pp", "tp") if getattr(self._plan, axis) > 1]
