"""The settings of an asynchronous run beside its job and plan, and which snapshots they make due."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.asynchronous.protocol.head import Rules
from meshloom.core.errors import JobError, PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.failure import EndedError

DEFAULT_SNAPSHOT_EVERY = 100
DEFAULT_LISTEN = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class AsynchronousSettings:
    """The settings of a run.

    steps: updates of the whole run. overwrite: whether an earlier run's checkpoints in `out` may be deleted.
    snapshot_every: updates between snapshots to which servers can go back.
    circumstances: of the virtual clock. listen: HOST:PORT of server 0, on processes.
    timeout_seconds: how long processes wait for a worker or a server before they give up.
    """

    steps: int
    out: Path | None = None
    resume: Path | None = None
    overwrite: bool = False
    dtype: torch.dtype | None = None
    snapshot_every: int = DEFAULT_SNAPSHOT_EVERY
    circumstances: Circumstances = field(default_factory=Circumstances)
    listen: str = DEFAULT_LISTEN
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.snapshot_every < 1:
            raise PlanError(f"snapshot_every={self.snapshot_every} must be 1 or more updates.")

    def to_json(self) -> str:
        """The part that servers and workers need, for processes."""
        paths = {"out": self.out, "resume": self.resume}
        texts = {name: str(path.absolute()) if path is not None else None for name, path in paths.items()}
        numbers = {name: getattr(self, name) for name in ("steps", "snapshot_every", "timeout_seconds")}
        return json.dumps({**numbers, **texts})

    @staticmethod
    def from_json(text: str) -> AsynchronousSettings:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        for name in ("out", "resume"):
            values[name] = Path(values[name]) if values[name] is not None else None
        return AsynchronousSettings(**values)

    def evaluates(self, job: Job, version: int) -> bool:
        """Whether the snapshot after update `version` is evaluated."""
        return job.evaluate is not None and (version == self.steps or version % job.evaluate.every == 0)

    def saves(self, job: Job, version: int) -> bool:
        """Whether it is saved as a checkpoint."""
        regular = job.checkpoint_every is not None and version % job.checkpoint_every == 0
        return self.out is not None and (version == self.steps or regular)

    def looks_at(self, job: Job, version: int) -> bool:
        """Whether it is evaluated or saved."""
        return self.evaluates(job, version) or self.saves(job, version)

    def rules(self, job: Job, plan: Plan) -> Rules:
        """For the head."""
        periods = [self.snapshot_every, *([job.evaluate.every] if job.evaluate else [])]
        periods += [job.checkpoint_every] if self.out and job.checkpoint_every else []
        return Rules(
            num_servers=plan.servers, staleness=plan.staleness, steps=self.steps, keep_every=periods,
            rate_by_age=plan.rate_by_age,
        )  # fmt: skip


def stopped_and_saved(signal_number: int, update: int, settings: AsynchronousSettings) -> EndedError:
    """What ends a run that a signal has asked to end, once `update` is saved."""
    name = signal.Signals(signal_number).name
    return EndedError(
        f"Stopped by {name} after update {update} of {settings.steps}, which is saved. Go on with --resume {settings.out}.",
        128 + signal_number,
    )


def check_foreground(job: Job) -> None:
    """Raises `JobError` if `job` asks for what workers cannot do: they hold no state to save."""
    if job.checkpoint != "foreground":
        raise JobError(
            f"Job(checkpoint={job.checkpoint!r}) is for ranks that save what they hold; with exchange=async checkpoints are made of the servers' snapshots. "
            "Leave it out, or give --checkpoint foreground."
        )


def refuse_common_steps() -> NoReturn:
    """Raise `PlanError`: workers take no steps together."""
    raise PlanError(
        "exchange=async has no steps that all workers take together, so there is no loop of one's own. Use Trainer.fit()."
    )
