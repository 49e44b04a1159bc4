"""The checkpoints of a synchronous run: where they are, which one is resumed, and how one is written."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing.config_files import config_files_of
from meshloom.checkpoint.writing.parallel import parallel
from meshloom.checkpoint.writing.run_directory import open_directory
from meshloom.checkpoint.writing.saving import save
from meshloom.checkpoint.writing.streamed import streamed
from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.errors import CheckpointError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.shares import Shares
from meshloom.launch.transport import host_identity
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import held_weights, optimizer_state, resume, weights
from meshloom.train.local_replicas import LocalReplicas


class RunCheckpoints:
    """In directory `out`, if any; opened by all ranks. `newest`: step and path of the newest one of this
    run."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        shares: Shares,
        replicas: LocalReplicas,
        out: Path | None,
        *,
        resume: Path | None,
        overwrite: bool,
    ) -> None:
        self._job, self._plan, self._shares, self._replicas, self._out = job, plan, shares, replicas, out
        self.newest: tuple[int, Path] | None = None
        hosts = replicas.together(lambda replica: collect(replica.context.world, host_identity()))[0]
        self._one_host = len(set(hosts)) == 1
        # An earlier run's checkpoints, until this run has its own.
        self._replaced = replicas.together(
            lambda replica: open_directory(out, replica.context.world, resume=resume, overwrite=overwrite)
        )[0]

    def resume(self, directory: Path, steps: int) -> Checkpoint:
        """Load the newest complete checkpoint in `directory` into all replicas; returns it."""
        return self._replicas.together(
            lambda replica: resume(replica, directory, partial(self._check, replica, steps))
        )[0]

    def _check(self, replica: Replica, steps: int, checkpoint: Checkpoint) -> None:
        if "asynchronous" in checkpoint.values:
            raise CheckpointError(
                f"{checkpoint.path} was written under {checkpoint.plan_text}, whose steps are shares of a batch that workers push one by one. "
                "Go on with exchange=async, or start a new run."
            )
        checkpoint.check_data(self._job)
        checkpoint.check(replica.shards.fingerprint(replica.model))
        checkpoint.check_steps_left(steps)

    def save(self, step: int) -> Path:
        """Write the state after `step`; returns the path."""
        if self._out is None:
            raise CheckpointError(
                "There is nowhere to save to. Give Trainer(out=DIRECTORY), or --out DIRECTORY."
            )
        out = self._out
        self._replicas.enter("saving", step)

        def write(replica: Replica) -> Steps[Path]:
            pieces, streams, values = yield from optimizer_state(replica, gather=not self._one_host)
            path = yield from save(
                out,
                step,
                write=parallel(held_weights(replica), pieces)
                if self._one_host
                else streamed(weights(replica), pieces, streams),
                values={
                    "updater": values,
                    "seed": self._job.seed,
                    "batch_size": self._job.batch_size,
                    "shares": self._shares.record,
                },
                fingerprint=replica.shards.fingerprint(replica.model),
                plan_text=str(self._plan),
                group=replica.context.world,
                keep=self._job.keep_checkpoints,
                replaced=self._replaced,
                config_files=config_files_of(replica.model),
            )
            return path

        path = self._replicas.together(write)[0]
        self._replaced = []
        self.newest = step, path
        self._replicas.enter("between steps", step)
        return path
