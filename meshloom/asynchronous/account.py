"""The account of an asynchronous run: updates, their ages and losses, as progress and final lines."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path

from meshloom.asynchronous.protocol.events import Update
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.telemetry.progress import Progress
from meshloom.telemetry.summary import Summary, TimeShares
from meshloom.telemetry.traffic import Traffic

AGES_SHOWN = 100  # newest updates over which the age that is shown is averaged


class RunAccount:
    """steps: updates of the whole run. num_updates: since this start. lost: those that were lost later."""

    def __init__(self, job: Job, plan: Plan, steps: int) -> None:
        self.num_updates = 0
        self.lost = 0
        self.bytes: Counter[str] = Counter()  # push and pull, of all workers together
        self.push_bytes = self.pull_bytes = 0  # of one
        self._job, self._plan, self._steps = job, plan, steps
        self._newest_ages: list[int] = []
        self._losses: list[float] = []
        self.began = time.monotonic()

    def updated(self, update: Update) -> None:
        """Add an update."""
        self.num_updates += 1
        self._losses[1:] = [update.loss]  # the first and the newest
        self._losses = self._losses or [update.loss]
        self._newest_ages = [*self._newest_ages[1 - AGES_SHOWN :], update.age]

    def restored(self, version: int, lost: int) -> str:
        """All servers went back to a snapshot: count the lost updates; a sentence about it."""
        self.lost += lost
        gone = f"{format_count(lost, 'update')}, whose samples are not read again" if lost else "nothing"
        return f"all servers are at the snapshot of update {version} again; lost since then: {gone}"

    def progress(
        self,
        update: Update,
        *,
        learning_rates: list[float],
        memory_bytes: int,
        virtual_seconds: float | None = None,
    ) -> Progress:
        """The progress after the newest update."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        samples = self.num_updates * self._job.batch_size / self._plan.dp / seconds
        return Progress(
            step=update.version,
            steps=self._steps,
            loss=update.loss,
            gradient_norm=None if math.isnan(update.norm) else update.norm,
            learning_rates=learning_rates,
            samples_per_second=samples,
            tokens_per_second=samples * self._job.tokens_per_sample if self._job.tokens_per_sample else None,
            seconds_left=seconds / self.num_updates * (self._steps - update.version),
            memory_bytes=memory_bytes,
            age=sum(self._newest_ages) / len(self._newest_ages),
            virtual_seconds=virtual_seconds,
        )

    def lines(self, seconds: float, clock: str, ages: Counter[int], computing: dict[int, float]) -> list[str]:
        """The lines at the end. clock: of the seconds. computing: the part of each worker's time."""
        total = max(1, ages.total())
        mean = sum(age * count for age, count in ages.items()) / total
        busy = " ".join(f"{worker}: {part:.0%}" for worker, part in sorted(computing.items()))
        shown = "  ".join(f"{age}: {count / total:.0%}" for age, count in sorted(ages.items()))
        lines = [
            f"{clock}: {format_count(self.num_updates, 'update')} in {seconds:.6g} s, {self.num_updates / max(seconds, 1e-9):.3g} updates/s; "
            f"workers computed for this part of their time: {busy}",
            f"ages of the parameters behind the updates: mean {mean:.2f}; {shown}",
        ]
        if self.lost:
            lines.append(f"{format_count(self.lost, 'update')} lost with servers")
        return lines

    def summary(
        self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None, shares: TimeShares
    ) -> Summary:
        """Bytes of all workers together; shares of their time."""
        predicted = {"push": self.num_updates * self.push_bytes, "pull": self.num_updates * self.pull_bytes}
        return Summary(
            steps=self.num_updates,
            seconds=seconds,
            first_loss=self._losses[0] if self._losses else math.nan,
            last_loss=self._losses[-1] if self._losses else math.nan,
            evaluation=evaluation,
            predicted=Traffic({"dp": predicted}),
            counted=Traffic({"dp": dict(self.bytes)}),
            shares=shares,
            checkpoint=checkpoint,
        )
