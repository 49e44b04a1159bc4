"""The contract of runs behind a `Trainer`, synchronous and asynchronous."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from meshloom.data.chunks import Chunk
from meshloom.telemetry.summary import Summary


class Batch(NamedTuple):
    """This process's share of one global batch: the chunks of each replica that lives here (of all, when
    simulated)."""

    step: int
    shares: list[list[Chunk]]

    @property
    def chunks(self) -> list[Chunk]:
        """All of them, in order."""
        return [chunk for share in self.shares for chunk in share]


class TrainingRun(Protocol):
    """`next_step`: steps done, counted over the whole run."""

    next_step: int

    def fit(self) -> Summary:
        """Train to the last step, evaluating and saving when due."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Of the steps that are left. Raises `PlanError` where there are none that all take together."""
        ...

    def step(self, batch: Batch) -> float:
        """Train on one of `batches()`; the mean loss of the whole global batch."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Every metric of the job's `Evaluate`, averaged over all of its data; steps schedulers that go by one."""
        ...

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the newest state; its path. wait: until it is whole."""
        ...

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises why it could not be."""
        ...

    def summary(self, seconds: float, evaluation: dict[str, float], checkpoint: Path | None) -> Summary:
        """What the run came to so far."""
        ...

    def close(self) -> None:
        """End what it has started, and take the hooks off the models."""
        ...
