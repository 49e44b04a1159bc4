"""Snapshots of an asynchronous run as checkpoints on disk, and back: whole tensors, so that any number of servers can go on from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshloom.asynchronous.parameters import Content
from meshloom.asynchronous.replica import WorkerReplica
from meshloom.asynchronous.settings import Settings
from meshloom.asynchronous.shares import Shares
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import run_in_steps
from meshloom.errors import CheckpointError
from meshloom.exchange.elastic.head import first_state
from meshloom.exchange.elastic.ledger import Ledger
from meshloom.exchange.elastic.messages import Kind
from meshloom.job import Job
from meshloom.plan import Plan
from meshloom.report.terminal import how_many
from meshloom.state.checkpoint import Checkpoint, find, save


def write_snapshot(directory: Path, version: int, contents: Sequence[Content], state: Any, model: nn.Module, job: Job, plan: Plan) -> Path:
    """Save the snapshot after update `version`; its path. contents: of all servers. state: the head's. model: loaded with it."""
    values = {
        "updater": contents[0].settings,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "asynchronous": {"state": state, "dp": plan.dp, "microbatches": plan.microbatches},
    }
    steps = save(
        directory,
        version,
        weights=model.state_dict(),
        pieces=[piece for content in contents for piece in content.pieces],
        values=values,
        fingerprint=_fingerprint(model),
        plan_text=str(plan),
        group=simulated_groups(1)[0],
        keep=job.keep_checkpoints,
    )
    return run_in_steps([steps])[0]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: after update `version`, with the head's `state`. checkpoint: with the parameters; None: the job's own."""

    version: int
    state: Any
    checkpoint: Checkpoint | None

    @staticmethod
    def find(settings: Settings, job: Job, plan: Plan, shares: Shares, model: nn.Module) -> Start:
        """At the checkpoint that the settings name, or at the beginning. Raises `CheckpointError` for one that this run cannot go on from."""
        if settings.resume is None:
            return Start(version=0, state=first_state(), checkpoint=None)
        checkpoint = Checkpoint.open(find(settings.resume))
        if checkpoint.step >= settings.steps:
            raise CheckpointError(
                f"The checkpoint is at step {checkpoint.step} and the run has {how_many(settings.steps, 'step')}, so nothing is left. Give more with --steps."
            )
        return Start(version=checkpoint.step, state=read_state(checkpoint, job, plan, shares, model), checkpoint=checkpoint)

    def snapshot(self, replica: WorkerReplica, server: int) -> tuple[Kind, Content | None]:
        """What server `server` has then."""
        kind = Kind(incarnation=0, state=self.state)
        return kind, read_content(self.checkpoint, replica, server) if self.checkpoint else None


def read_content(checkpoint: Checkpoint, replica: WorkerReplica, server: int) -> Content:
    """What server `server` holds after the checkpoint's last update."""
    weights = checkpoint.weights()
    return Content(
        values=[
            weights[each.name].reshape(-1)[each.start : each.stop].to(each.parameter.device, each.parameter.dtype)
            for each in replica.division[server]
        ],
        buffers={name: weights.get(name, buffer).to(buffer.device, buffer.dtype) for name, buffer in replica.model.named_buffers()},
        read=checkpoint.read,
        shapes={key: checkpoint.shape(key) for key in checkpoint.keys()},  # noqa: SIM118  (a checkpoint is no dict)
        settings=checkpoint.values["updater"],
    )


def read_state(checkpoint: Checkpoint, job: Job, plan: Plan, shares: Shares, model: nn.Module) -> Any:
    """The head's state. A synchronous run has used the samples of as many whole batches as it has made steps.

    Raises `CheckpointError` if the checkpoint is of another model, or its data would not go on where it stopped.
    """
    checkpoint.check(_fingerprint(model))
    values: Any = checkpoint.values
    here = {"seed": job.seed, "batch_size": job.batch_size}
    there = {name: values[name] for name in here}
    if "asynchronous" in values:
        here |= {"dp": plan.dp, "microbatches": plan.microbatches}
        there |= {name: values["asynchronous"][name] for name in ("dp", "microbatches")}
    for name, value in here.items():
        if there[name] != value:
            raise CheckpointError(
                f"The checkpoint was written with {name}={there[name]} and this run has {name}={value}: the data would not go on where it stopped. "
                f"Set {name}={there[name]}, or start a new run."
            )
    if "asynchronous" in values:
        return values["asynchronous"]["state"]
    return {"ledger": Ledger(shares.first_of(checkpoint.step)).state(), "ages": {}}


def _fingerprint(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of everything that a checkpoint of this model holds."""
    return {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
