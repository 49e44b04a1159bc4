"""What a server tells its launcher: updates, snapshots, who came and went, and counts of bytes and of what it
refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from torch import Tensor

from meshloom.asynchronous.messaging.handshake import WorkerSeconds
from meshloom.asynchronous.protocol.events import Expelled, Restored, Snapshot, Update
from meshloom.asynchronous.protocol.head import Head
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.snapshots import due_path, snapshot_name
from meshloom.comm.messaging.endpoint import RefusedCounts
from meshloom.core.job import Job
from meshloom.launch.world import peak_memory_bytes

Tell = Callable[[Mapping[str, object]], object]
_COUNT_SECONDS = 1.0  # between what is told of counts


class Reports:
    """tell: takes one event. directory: of the run, with the snapshots of `num_servers` servers."""

    def __init__(
        self, tell: Tell, directory: Path, num_servers: int, job: Job, settings: AsynchronousSettings
    ) -> None:
        self._tell, self._directory, self._num_servers, self._job, self._settings = (
            tell,
            directory,
            num_servers,
            job,
            settings,
        )
        self._present: set[int] = set()  # workers that have joined
        self._finished = False
        self._bytes = {"push": 0, "pull": 0}
        self._once = {"push": 0, "pull": 0}  # of one message
        self._told: dict[str, int] = {}
        self._told_at = time.monotonic()

    def notes(self, notes: Sequence[str]) -> None:
        """What the user should know, once."""
        for note in notes:
            self._tell({"event": "note", "text": note})

    def serving(self) -> None:
        """This start of the server begins."""
        self._tell({"event": "serving"})

    def joined(self, worker: int) -> None:
        """It takes part, perhaps again."""
        if worker not in self._present:
            self._present.add(worker)
            self._tell({"event": "worker", "worker": worker, "what": "joined"})

    def gone(self, worker: int, what: Literal["left", "lost", "expelled"]) -> None:
        """It does not take part any more, if it did."""
        if worker in self._present:
            self._present.remove(worker)
            self._tell({"event": "worker", "worker": worker, "what": what})

    def tally(self, tally: WorkerSeconds) -> None:
        """Where the time of a worker went."""
        self._tell({"event": "tally", **asdict(tally)})

    def events(self, head: Head, learning_rates: list[float]) -> None:
        """What has happened since the last call."""
        for event in head.take_events():
            match event:
                case Update():
                    self._tell(
                        {
                            "event": "update",
                            **asdict(event),
                            "rates": learning_rates,
                            "memory": peak_memory_bytes(),
                        }
                    )
                case Snapshot():
                    if self._settings.looks_at(self._job, event.version):
                        self._keep_due(event.version)
                    self._tell({"event": "snapshot", "version": event.version})
                case Expelled():
                    self.gone(event.worker, "expelled")
                case Restored():
                    self._tell({"event": "restored", "version": event.version, "lost": event.lost})
        if head.finished and not self._finished:
            self._finished = True
            self._tell(
                {"event": "finished", "ages": {str(age): count for age, count in sorted(head.ages.items())}}
            )

    def carried(
        self,
        what: Literal["push", "pull"],
        held: Sequence[Tensor | None],
        buffers: Mapping[str, Tensor] | None,
    ) -> None:
        """Count the bytes of a message about what the server holds."""
        num_bytes = sum(each.nbytes for each in (*held, *(buffers or {}).values()) if each is not None)
        self._bytes[what] += num_bytes
        self._once[what] = self._once[what] or num_bytes

    def counts(self, refused: RefusedCounts, late: int, *, now: bool = False) -> None:
        """Tell counts, if it is time or has to be `now`. late: pushes that the head has refused."""
        if not now and time.monotonic() < self._told_at + _COUNT_SECONDS:
            return
        self._told_at = time.monotonic()
        counts = {**self._bytes, **{f"{what}_once": num_bytes for what, num_bytes in self._once.items()}}
        counts |= {"refused": refused.messages + refused.connections, "late": late}
        if counts != self._told:
            self._told = counts
            self._tell({"event": "counts", **counts})

    def _keep_due(self, version: int) -> None:
        """Give all servers' files of a snapshot a second name, under which they stay when the servers let go
        of it."""
        for server in range(self._num_servers):
            # said again by a head that was started again; or the one that the run began with
            with suppress(FileExistsError, FileNotFoundError):
                os.link(
                    self._directory / f"server-{server}" / snapshot_name(version),
                    due_path(self._directory, version, server),
                )
