"""The checkpoints of a synchronous run: where they are, which one is resumed, and how one is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.copied_weights import tied_names
from meshloom.checkpoint.format import TORCHS_META, step_name
from meshloom.checkpoint.writing.across_hosts import write_across_hosts
from meshloom.checkpoint.writing.background_save import BackgroundSave, SavedShare
from meshloom.checkpoint.writing.config_files import config_files_of
from meshloom.checkpoint.writing.file_layout import HeldSpan
from meshloom.checkpoint.writing.host_copy import CopyMemory, HostCopy
from meshloom.checkpoint.writing.parallel import DividedState, divide, write_divided
from meshloom.checkpoint.writing.run_directory import open_directory
from meshloom.checkpoint.writing.save_room import find_room
from meshloom.checkpoint.writing.saving import save
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CheckpointError, MeshloomError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import format_seconds
from meshloom.data.shares import Shares
from meshloom.launch.transport import host_identity
from meshloom.machine.host_memory import free_bytes
from meshloom.machine.process_memory import regained_bytes
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import (
    check_saved,
    held_weights,
    resume,
    run_state,
    updated_weights,
)
from meshloom.telemetry.progress import Listener
from meshloom.train.local_replicas import LocalReplicas

BEST = "best"  # directory of the checkpoint whose evaluation was best

WAITED = "Training waited {} before saving step {}: the checkpoint of step {} was still being written. With a larger checkpoint_every it need not."
NOWHERE = "There is nowhere to save to. Give Trainer(out=DIRECTORY), or --out DIRECTORY."
SEVERAL_HOSTS = (
    "Checkpoints are written in the foreground: the ranks are on {} hosts, which send what they hold to be written, and "
    "checkpoint=background is for ranks of one host."
)

IN_FILE = (
    "Checkpoints are written in the foreground: offload=optimizer keeps the optimizer's state in a file, because a copy of it, which "
    "checkpoint=background would need, is too large for memory."
)


class RunCheckpoints:
    """In directory `out`, if any; opened by all ranks. `newest`: step and path of the newest one of this
    run that is whole. `saves`: whether there is a directory to save to. `also`: what else is in their values, equal on all ranks."""

    def __init__(
        self, job: Job, plan: Plan, shares: Shares, replicas: LocalReplicas, out: Path | None, listener: Listener, *,
        resume: Path | None, overwrite: bool, also: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._job, self._plan, self._shares, self._replicas, self._out = job, plan, shares, replicas, out
        self.newest: tuple[int, Path] | None = None
        self.saves = out is not None
        self.also: dict[str, Any] = also if also is not None else {}
        self._listener, self._told, self._has_waited = listener, False, False
        self._under_way: BackgroundSave | None = None
        self._written = SavedShare()
        self._copying: dict[int, HostCopy] = {}  # by rank, what may not be copied yet
        self._saved: list[tuple[int, Path]] = []
        hosts = replicas.together(lambda replica: collect(replica.context.world, host_identity()))[0]
        self._one_host = len(set(hosts)) == 1
        self._background = out is not None and job.checkpoint == "background"
        in_file = plan.offload != "none" and replicas.first.context.device.type == "cpu"
        if self._background and not self._one_host:
            listener.note(SEVERAL_HOSTS.format(len(set(hosts))))
        elif self._background and in_file:
            listener.note(IN_FILE)
        self._background &= self._one_host and not in_file
        self._memory: dict[int, CopyMemory] = {}  # by rank
        for replica in replicas.all if self._background else ():
            self._memory[replica.context.rank] = CopyMemory()
            replica.attached.chunks_done.append(
                lambda samples, rank=replica.context.rank: self._finish_copy(rank)
            )
        if out is not None:
            check_saved(replicas.first.model)
        # an earlier run's checkpoints, until this run has its own
        self._replaced = replicas.together(
            lambda replica: open_directory(out, replica.context.world, resume=resume, overwrite=overwrite)
        )[0]

    def resume(self, directory: Path, steps: int) -> Checkpoint:
        """Load the newest complete checkpoint in `directory` into all replicas; returns it."""
        is_torchs = (directory / TORCHS_META).is_file()
        there = self._replicas.together(lambda replica: collect(replica.context.world, is_torchs))[0]
        how = _way_of_torchs() if any(there) else resume
        return self._replicas.together(
            lambda replica: how(replica, directory, partial(_check, self._job, replica, steps))
        )[0]

    def save(self, step: int, *, wait: bool = True, best: bool = False, later: bool = False) -> Path:
        """Write the state after `step`; returns the path. wait: until the checkpoint is whole; otherwise, if the
        job saves in the background and its copy fits into memory, until the state is copied. best: as the one in
        best/, beside the others. later: nobody but updates changes trained parameters and the optimizers' state from now
        on, so that they are copied until the next update.

        Waits for an earlier save that is under way, and raises what that raises.
        """
        if self._out is None:
            raise CheckpointError(NOWHERE)
        out = self._out / BEST if best else self._out
        self._replicas.enter("saving", step)
        self._wait_before(step)
        background = self._background and not wait
        copies: list[_Copy] = []

        def write(replica: Replica) -> Path:
            pieces, values = run_state(replica)
            job = self._job
            values = {
                "seed": job.seed, "batch_size": job.batch_size,
                "shares": self._shares.record, **self.also, **values, **tied_names(replica.model),
            }  # fmt: skip
            carry_out = partial(
                save,
                out,
                step,
                values=deepcopy(values),  # as they are now
                fingerprint=replica.shards.fingerprint(replica.model),
                plan_text=str(self._plan),
                keep=1 if best else self._job.keep_checkpoints,
                replaced=[] if best else self._replaced,
                config_files=config_files_of(replica.model),
            )
            world = replica.context.world
            divided = divide(world, held_weights(replica), pieces)
            if not self._one_host:
                return carry_out(write=write_across_hosts(divided), group=world)
            saving = replica.context.saving
            if background and saving and self._fits(replica, divided, step):
                memory = self._memory[replica.context.rank]
                written = self._written if replica is self._replicas.first else SavedShare()
                copies.append((_copy_of(replica, divided, memory, written, later=later), carry_out, saving))
                self._copying[replica.context.rank] = copies[-1][0]
                return out / step_name(step)
            write = write_divided(divided, replica.updater.state.let_go, replica.timings.counted)
            return carry_out(write=write, group=world)

        try:
            path = self._replicas.together(write)[0]
        except BaseException:
            self._copying.clear()
            raise
        for replica in self._replicas.all:
            replica.updater.state.give_back()
        if copies:
            self._written.share = 0.0
            self._under_way = BackgroundSave(step, partial(_finish_copies, copies), partial(_carry_out, copies))  # fmt: skip
        elif best:
            self._saved.append((step, path))
        else:
            self._came_to(step, path)
        self._replicas.enter("between steps", step)
        return path

    @property
    def failed(self) -> bool:
        """Whether a save in the background has ended without a checkpoint; `finish` raises why."""
        return self._under_way is not None and self._under_way.failed

    @property
    def written_share(self) -> float | None:
        """How much of its bytes this process's first rank has written of the save in the background; None: none is under way."""
        return self._written.share if self._under_way is not None and not self._under_way.over else None

    def finish_copies(self) -> None:
        """Returns when parameters may change."""
        for rank in [*self._copying]:
            self._finish_copy(rank)

    def finish(self) -> None:
        """Wait for the save that is under way, if any. All ranks call it; raises the same `CheckpointError` on
        all of them if that save failed on some."""
        self.finish_copies()
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._came_to(under_way.step, under_way.wait())

    def tell_saved(self) -> None:
        """Tell the listener of the checkpoints that have become whole since the last call."""
        if self._under_way is not None and self._under_way.over and not self._under_way.failed:
            self.finish()
        saved, self._saved = self._saved, []
        for step, path in saved:
            self._listener.saved(step, path)

    def close(self) -> None:
        """Wait for the save that is under way; one that fails leaves the checkpoints before it."""
        with suppress(MeshloomError):
            self.finish()

    def _finish_copy(self, rank: int) -> None:
        if (copy := self._copying.pop(rank, None)) is not None:
            copy.before_update()

    def _came_to(self, step: int, path: Path) -> None:
        self._replaced = []
        self.newest = step, path
        self._saved.append(self.newest)

    def _wait_before(self, step: int) -> None:
        if (under_way := self._under_way) is None or under_way.over:
            self.finish()
            return
        began = time.monotonic()
        self._written.told = self._replicas.first.timings.counted
        self.finish()
        self._written.told = lambda done, of: None
        waited = time.monotonic() - began
        if self._has_waited and waited < 1:  # short ones are said once
            return
        self._has_waited = True
        self._listener.note(WAITED.format(format_seconds(waited), step, under_way.step))

    def _fits(self, replica: Replica, divided: DividedState, step: int) -> bool:
        """Whether all ranks' copies fit into their host's memory, beside what they are likely to take again in a step."""
        memory = self._memory[replica.context.rank]
        again = regained_bytes() if replica is self._replicas.first else 0
        found = find_room(replica.context.world, divided, memory, again=again, free=free_bytes())
        if found.missing:
            memory.release()
        if replica is self._replicas.first:
            if found.missing:
                self._listener.note(f"Step {step} is saved in the foreground: {found.missing}.")
            elif not self._told:
                self._listener.note(found.sentence())
            self._told = True
        return not found.missing


def _way_of_torchs() -> Any:
    # here, because torch.distributed.checkpoint takes half as long to import as torch itself
    from meshloom.train.from_torch.torch_resuming import resume_from_torch

    return resume_from_torch


def _check(job: Job, replica: Replica, steps: int, checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` if a checkpoint is not one of this run."""
    if "asynchronous" in checkpoint.values:
        raise CheckpointError(
            f"{checkpoint.path} was written under {checkpoint.plan_text}, whose steps are shares of a batch that workers push one by one. "
            "Go on with exchange=async, or start a new run."
        )
    checkpoint.check_data(job)
    checkpoint.check(replica.shards.fingerprint(replica.model))
    checkpoint.check_steps_left(steps)


_Copy = tuple[HostCopy, Callable[..., Path], Group]  # the save that writes it, and over which group


def _copy_of(
    replica: Replica, divided: DividedState, memory: CopyMemory, written: SavedShare, *, later: bool
) -> HostCopy:  # fmt: skip
    """written: what it notes. later: of `RunCheckpoints.save`."""
    names = updated_weights(replica) if later else frozenset[str]()
    return HostCopy(
        divided, memory, later=lambda span: later and _changes_in_updates(span, names),
        trusted=dict(replica.named) if later and replica.exchange.ownership.memory == "shared" else {}, told=written.note,
    )  # fmt: skip


def _changes_in_updates(span: HeldSpan, names: frozenset[str]) -> bool:
    """Whether only updates change it. names: of such weights."""
    return span.kind == "state" or span.key in names


def _finish_copies(copies: Sequence[_Copy]) -> None:
    """On the thread that saves, for all ranks of this process."""
    for copy, _, _ in copies:
        copy.finish()


def _carry_out(copies: Sequence[_Copy]) -> Path:
    """Likewise."""
    saves = [partial(save, write=copy.write, group=group) for copy, save, group in copies]
    # training draws meanwhile
    return (in_turns(saves, apart=nullcontext) if len(saves) > 1 else [save() for save in saves])[0]
