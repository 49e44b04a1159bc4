"""What servers report to the launcher of a run on processes: shown as it arrives, and added up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from meshloom.asynchronous.account import RunAccount
from meshloom.asynchronous.protocol.events import Update
from meshloom.core.plan import Plan
from meshloom.telemetry.progress import Listener
from meshloom.telemetry.summary import TimeShares

_WHAT_HAPPENED = {
    "joined": "has joined",
    "left": "has left",
    "lost": "is lost: so is its gradient, and its samples are not read again",
}


class ReceivedReports:
    """version: of the newest update. snapshot_due: called with the version of one that all servers have, and that is to be evaluated or saved.

    present: workers that take part. moved: when anything happened last.
    finished: whether the last update is done. ages: of the updates, once it is.
    """

    def __init__(
        self,
        plan: Plan,
        account: RunAccount,
        listener: Listener,
        version: int,
        snapshot_due: Callable[[int], None],
    ) -> None:
        self.version = version
        self.present: set[int] = set()
        self.moved = time.monotonic()
        self.finished = False
        self.ages: Counter[int] = Counter()
        self._plan, self._account, self._listener = plan, account, listener
        self._snapshot_due = snapshot_due
        self._counts: dict[tuple[str, int], dict[str, int]] = {}  # of each start of a server
        self._starts: Counter[str] = Counter()
        self._worker_seconds: dict[int, dict[str, float]] = {}
        self._noted: set[str] = set()

    def receive(self, reports: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Reports, each with the name of its process."""
        for who, event in reports:
            match event.pop("event"):
                case "update":
                    rates, memory_bytes = event.pop("rates"), event.pop("memory")
                    self._updated(Update(**event), rates, memory_bytes)
                case "due":
                    self._snapshot_due(event["version"])
                case "restored":
                    self._restored(event["version"])
                case "worker":
                    self._worker(event["worker"], event["what"])
                case "tally":
                    self._worker_seconds[event["worker"]] = event
                case "counts":
                    self._counts[who, self._starts[who]] = event
                case "finished":
                    self.finished = True
                    self.ages = Counter({int(age): count for age, count in event["ages"].items()})
                # a restarted server repeats its notes
                case "note" if event["text"] not in self._noted:
                    self._noted.add(event["text"])
                    self._listener.note(event["text"])
                case "serving":  # all servers have started, and workers join anew
                    self.moved = time.monotonic()
                    self.present.clear()
                    self._starts[who] += 1
                case _:
                    pass

    def count(self, name: str) -> int:
        """A count of all starts of all servers."""
        return sum(counts[name] for counts in self._counts.values())

    def computing(self) -> dict[int, float]:
        """The part of its time that each worker computed."""
        return {
            worker: seconds["computing"] / max(seconds["seconds"], 1e-9)
            for worker, seconds in sorted(self._worker_seconds.items())
        }

    def add_bytes(self) -> None:
        """Put the bytes of pushes and pulls into the account."""
        newest = {who: self._counts[who, start] for who, start in sorted(self._counts)}
        self._account.push_bytes, self._account.pull_bytes = (
            sum(counts[f"{what}_once"] for counts in newest.values()) for what in ("push", "pull")
        )
        self._account.bytes.update(push=self.count("push"), pull=self.count("pull"))

    def time_shares(self) -> TimeShares:
        """Of the workers that left in order. With a bounded plan the time not spent computing or reading
        counts as waiting for slower workers: it cannot be told from communication."""
        total, computing, reading = (
            sum(seconds[name] for seconds in self._worker_seconds.values())
            for name in ("seconds", "computing", "reading")
        )
        compute, data = computing / max(total, 1e-9), reading / max(total, 1e-9)
        rest = max(0.0, 1 - compute - data)
        waiting = rest if self._plan.staleness is not None else 0.0
        return TimeShares(compute=compute, communication=rest - waiting, waiting=waiting, data=data)

    def _updated(self, update: Update, rates: list[float], memory_bytes: int) -> None:
        self.version = update.version
        self.moved = time.monotonic()
        self._account.updated(update)
        self._listener.step(self._account.progress(update, learning_rates=rates, memory_bytes=memory_bytes))

    def _restored(self, version: int) -> None:
        lost, self.version = self.version - version, version
        if self._account.num_updates or lost:  # else it is the start
            self._listener.note(self._account.restored(version, lost))

    def _worker(self, worker: int, what: str) -> None:
        if (worker in self.present) == (what == "joined"):
            return  # as before
        self.moved = time.monotonic()
        if not self._account.num_updates:
            self._account.began = time.monotonic()  # until now, processes were starting
        (self.present.add if what == "joined" else self.present.discard)(worker)
        if not self.finished and not (what == "joined" and worker < self._plan.dp):
            self._listener.note(f"after update {self.version} worker {worker} {_WHAT_HAPPENED[what]}")
