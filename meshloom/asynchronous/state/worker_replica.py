"""A worker's replica, of one rank: it computes gradients at the servers' values, and updates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from meshloom.asynchronous.protocol.worker import Computed
from meshloom.asynchronous.state.parameters import changes_of
from meshloom.asynchronous.state.worker_model import WorkerModel
from meshloom.core.errors import DataError, JobError, TrainingError
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.plan import Plan
from meshloom.core.plan_shares import chunk_sizes
from meshloom.data.chunks import Chunk
from meshloom.launch.one_process import world_in_one_process
from meshloom.replica.metrics import evaluate
from meshloom.replica.prepare import prepare
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import full_gradients


class WorkerReplica:
    """plan: of the run, by whose microbatches and settings this replica computes alone. devices: of a world in
    one process."""

    def __init__(self, job: Job, plan: Plan, devices: str = "cpu", dtype: torch.dtype | None = None) -> None:
        job = in_precision(job, plan)
        alone = replace(plan, dp=1, exchange="all_reduce", servers=1, staleness=None, rate_by_age=False)
        share = sum(chunk_sizes(job.batch_size, plan.num_chunks)[: plan.microbatches])
        [rank] = world_in_one_process(alone.mesh, devices).local
        own_job = replace(job, batch_size=share, clip_grad_norm=None)
        self._replica = Replica(own_job, alone, rank, dtype=dtype, updates=False)
        self.whole_model = WorkerModel(job, plan, self._replica.model)
        prepare(self._replica)

    @property
    def model(self) -> torch.nn.Module:
        """With the values that were loaded last."""
        return self.whole_model.model

    def take_notes(self) -> list[str]:
        """Notes for the user about what forwards write, each once; clears them."""
        return list(dict.fromkeys(self._replica.scope.take_notes()))

    def compute(self, worker: int, chunks: Sequence[Chunk]) -> Computed:
        """Mean gradient of a share at the loaded values. Raises `TrainingError` if it is not finite."""
        replica = self._replica
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            found = replica.gradients(chunks[0].step, chunks)
        except (TrainingError, DataError) as error:
            raise type(error)(f"Worker {worker}: {error}") from error
        if found.logged:
            raise JobError(
                f"The loss logs {', '.join(found.logged)}, and with exchange=async no step has one mean over a global batch. "
                "Take meshloom.log out, or measure it by Evaluate(metrics=...)."
            )
        gradients = full_gradients(replica, found)
        changes = changes_of(before, dict(self.model.named_buffers()))
        return self.whole_model.computed(worker, chunks, gradients, changes, found.loss)

    def evaluate(self, chunks: Iterable[Chunk], updates: int, *, trial: bool = False) -> dict[str, float]:
        """Every metric over the chunks, in evaluation mode, at the loaded values, those after `updates` updates. trial: of `metrics.evaluate`."""
        return evaluate(self._replica, chunks, updates, trial=trial)

    def close(self) -> None:
        """Remove the model's hooks."""
        self._replica.close()
