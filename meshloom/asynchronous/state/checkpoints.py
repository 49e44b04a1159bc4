"""Snapshots as checkpoints of whole tensors, from which any number of servers can go on, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshloom.asynchronous.protocol.head import first_state, head_state
from meshloom.asynchronous.state.parameters import Content
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.worker_model import WorkerModel
from meshloom.checkpoint.checkpoint import Checkpoint, Piece, check_same_data, find, passed_over
from meshloom.checkpoint.writing.parallel import parallel
from meshloom.checkpoint.writing.saving import save
from meshloom.comm.simulated import simulated_groups
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.exchange.exchange import Slice
from meshloom.parameters.shards import Shards


def write_snapshot(
    directory: Path, version: int, contents: Sequence[Content], state: Any, model: nn.Module, job: Job,
    plan: Plan, replaced: Sequence[Path] = (),
) -> Path:  # fmt: skip
    """Save the snapshot after update `version`; its path.

    contents: of all servers. state: the head's. model: with the snapshot's values. replaced: as for `save`.
    """
    values = {
        "updater": contents[0].settings,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "asynchronous": {"state": state, "dp": plan.dp, "microbatches": plan.microbatches},
    }
    weights = [
        Piece(name, each.reshape(-1), 0, each.numel(), tuple(each.shape))
        for name, each in model.state_dict().items()
    ]
    # what is saved in full comes from several servers
    pieces = {piece.name: piece for content in contents for piece in content.pieces}
    return save(
        directory,
        version,
        write=parallel(weights, list(pieces.values())),
        values=values,
        fingerprint=Shards({}, None).fingerprint(model),
        plan_text=str(plan),
        group=simulated_groups(1)[0],
        keep=job.keep_checkpoints,
        replaced=replaced,
    )


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts: after update `version`, with the head's `state` and the checkpoint's parameters."""

    version: int
    state: Any
    checkpoint: Checkpoint | None

    @staticmethod
    def find(
        settings: AsynchronousSettings, job: Job, plan: Plan, shares: PushShares, model: nn.Module
    ) -> Start:
        """At the checkpoint of the settings, if any. Raises `CheckpointError` if it cannot be continued."""
        if settings.resume is None:
            return Start(version=0, state=first_state(), checkpoint=None)
        checkpoint = Checkpoint.open(find(settings.resume))
        checkpoint.check_steps_left(settings.steps)
        state = read_state(checkpoint, job, plan, shares, model)
        return Start(version=checkpoint.step, state=state, checkpoint=checkpoint)

    def notes(self) -> list[str]:
        """Lines about newer checkpoints that were skipped."""
        said = passed_over(self.checkpoint.path) if self.checkpoint else ""
        return [said] if said else []

    def snapshot(self, replica: WorkerModel, server: int) -> tuple[Any, Content | None]:
        """The snapshot of server `server` then."""
        return self.state, read_content(self.checkpoint, replica, server) if self.checkpoint else None


def read_content(checkpoint: Checkpoint, replica: WorkerModel, server: int) -> Content:
    """The content of server `server` after the checkpoint's last update."""
    weights = checkpoint.weights()

    def value(of: Slice) -> Tensor:
        return weights[of.name].reshape(-1)[of.start : of.stop].to(of.parameter.device, of.parameter.dtype)

    return Content(
        values=[value(each) for each in replica.division[server]],
        buffers={
            name: weights.get(name, buffer).to(buffer.device, buffer.dtype)
            for name, buffer in replica.model.named_buffers()
        },
        read=checkpoint.read,
        shapes={key: checkpoint.shape(key) for key in checkpoint.keys()},  # noqa: SIM118
        settings=checkpoint.values["updater"],
    )


def read_state(checkpoint: Checkpoint, job: Job, plan: Plan, shares: PushShares, model: nn.Module) -> Any:
    """The head's state. A synchronous run has used as many whole batches as steps.

    Raises `CheckpointError` if it is of another model, or the data would not continue where it stopped.
    """
    checkpoint.check(Shards({}, None).fingerprint(model))
    values: Any = checkpoint.values
    checkpoint.check_data(job)
    if "asynchronous" in values:
        here = {"dp": plan.dp, "microbatches": plan.microbatches}
        check_same_data(values["asynchronous"], here, "the plan")
        state = values["asynchronous"]["state"]
        # earlier versions kept it among shares that were to be given out again
        return {"ages": state["ages"], "next_share": state.get("ledger", state)["next_share"]}
    return head_state(shares.first_of(checkpoint.step), {})
