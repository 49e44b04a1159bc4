"""The reports of a server to its launcher: updates, snapshots, workers that joined and left, and counts."""

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
from meshloom.asynchronous.protocol.events import Restored, Snapshot, Update
from meshloom.asynchronous.protocol.head import Head
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.snapshots import due_path, snapshot_name
from meshloom.comm.messaging.endpoint import RefusedCounts
from meshloom.core.job import Job
from meshloom.machine.process_memory import peak_memory_bytes

SendEvent = Callable[[Mapping[str, object]], object]
_COUNT_SECONDS = 1.0  # between reports of counts


class Reports:
    """send_event: takes one event. directory: of the run, with the snapshots of `num_servers` servers."""

    def __init__(
        self,
        send_event: SendEvent,
        directory: Path,
        num_servers: int,
        job: Job,
        settings: AsynchronousSettings,
    ) -> None:
        self._send_event, self._directory, self._num_servers = send_event, directory, num_servers
        self._job, self._settings = job, settings
        self.asked = False  # whether every snapshot is due, as the run is to end
        self._finished = False
        self._bytes = {"push": 0, "pull": 0}
        self._once = {"push": 0, "pull": 0}  # of one message
        self._sent_counts: dict[str, int] = {}
        self._sent_at = time.monotonic()

    def notes(self, notes: Sequence[str]) -> None:
        """Notes for the user."""
        for note in notes:
            self._send_event({"event": "note", "text": note})

    def serving(self) -> None:
        """This start of the server begins."""
        self._send_event({"event": "serving"})

    def worker(self, worker: int, what: Literal["joined", "left", "lost"]) -> None:
        """The worker takes part, perhaps as before, or no longer, if it did."""
        self._send_event({"event": "worker", "worker": worker, "what": what})

    def tally(self, tally: WorkerSeconds) -> None:
        """How a worker spent its time."""
        self._send_event({"event": "tally", **asdict(tally)})

    def events(self, head: Head, learning_rates: list[float]) -> None:
        """The head's events since the last call."""
        for event in head.take_events():
            match event:
                case Update():
                    now = {"rates": learning_rates, "memory": peak_memory_bytes()}
                    self._send_event({"event": "update", **asdict(event), **now})
                case Snapshot():
                    if self.asked or self._settings.looks_at(self._job, event.version):
                        self._keep_due(event.version)
                        self._send_event({"event": "due", "version": event.version})
                case Restored():
                    self._send_event({"event": "restored", "version": event.version})
        if head.finished and not self._finished:
            self._finished = True
            ages = {str(age): count for age, count in sorted(head.ages.items())}
            self._send_event({"event": "finished", "ages": ages})

    def carried(
        self,
        what: Literal["push", "pull"],
        held: Sequence[Tensor | None],
        buffers: Mapping[str, Tensor] | None,
    ) -> None:
        """Count the bytes of a push or of parameters."""
        num_bytes = sum(each.nbytes for each in (*held, *(buffers or {}).values()) if each is not None)
        self._bytes[what] += num_bytes
        self._once[what] = self._once[what] or num_bytes

    def counts(self, refused: RefusedCounts, *, now: bool = False) -> None:
        """Report counts, if it is time or `now`."""
        if not now and time.monotonic() < self._sent_at + _COUNT_SECONDS:
            return
        self._sent_at = time.monotonic()
        counts = {**self._bytes, **{f"{what}_once": num_bytes for what, num_bytes in self._once.items()}}
        counts["refused"] = refused.messages + refused.connections
        if counts != self._sent_counts:
            self._sent_counts = counts
            self._send_event({"event": "counts", **counts})

    def _keep_due(self, version: int) -> None:
        """Give all servers' files of a snapshot a second name, so that they stay when servers delete it."""
        for server in range(self._num_servers):
            path = self._directory / f"server-{server}" / snapshot_name(version)
            # reported again by a restarted head; or the one that the run began with
            with suppress(FileExistsError, FileNotFoundError):
                os.link(path, due_path(self._directory, version, server))
