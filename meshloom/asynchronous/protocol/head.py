"""The head of an asynchronous run: it decides who computes what, and gives every push its place in one order
that all servers follow.

    worker  --Push--> servers --Staged--> head: when all servers have their part, the push is update n     (exactly once: its ticket is used up)
    head    --Apply n, Give--> servers --Part--> worker                                                    (all parts are of one version)

What the head says to a server is done in order, so parameters that a worker gets from several servers are all
of the same version, and several servers compute what one server would. A push whose ticket is not out (the
worker counted as lost, the servers went back to a snapshot, the message came twice) is refused, and dropped
by all servers.

When a server comes back after it was killed, all servers go back to the newest snapshot that all of them
have: there is one history. The updates after it are lost as a block; the shares of data in them are free
again. A head that starts knows nothing but what servers report, so starting, resuming and coming back are the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshloom.asynchronous.protocol.events import Event, Expelled, Restored, Update
from meshloom.asynchronous.protocol.kept_snapshots import KeptSnapshots, newest_common
from meshloom.asynchronous.protocol.leases import Leases
from meshloom.asynchronous.protocol.ledger import Ledger
from meshloom.asynchronous.protocol.messages import (
    Address,
    Apply,
    Back,
    Broken,
    Done,
    Drop,
    Give,
    Join,
    Keep,
    Leave,
    PushStaged,
    Rejoin,
    ReportRequest,
    Restore,
    Sent,
    SnapshotKept,
)

STARTS = 1 << 20  # incarnations that one start of a head may use: start n begins with n * STARTS


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a run goes.

    num_servers: 1 or more. staleness: bound of the clocks, None: none. steps: updates of the whole run.
    keep_every: a snapshot is taken after every update whose number is a multiple of one of these, and after
        the last.
    rate_by_age: learning rates are divided by the age of the gradient's parameters if that is above 1 (Zhang
        et al., 2016).
    """

    num_servers: int
    staleness: int | None
    steps: int
    keep_every: Sequence[int]
    rate_by_age: bool = False

    def keeps(self, version: int) -> bool:
        """Whether a snapshot is taken after update `version`."""
        return version == self.steps or any(version % every == 0 for every in self.keep_every)

    def rate(self, age: int) -> float:
        """What learning rates are multiplied by."""
        return 1.0 / max(1, age) if self.rate_by_age else 1.0


def first_state() -> dict[str, Any]:
    """The head's state before the first update, as it stands in snapshot 0."""
    return _state(Ledger(), {})


class Head:
    """incarnation: larger than any that an earlier head of this run has used, by a margin: it counts up from
    it."""

    def __init__(self, rules: Rules, incarnation: int = 0) -> None:
        self._rules = rules
        self.incarnation = incarnation
        self.version = -1
        self.ages: Counter[int] = Counter()
        self.refused = 0  # pushes
        self._events: list[Event] = []
        self._expelled: set[int] = set()  # what they push would be refused again and again
        self._clear(Ledger())
        self._reports: dict[int, Back] | None = {}  # while servers are asked what they have; None: running

    @property
    def finished(self) -> bool:
        """All updates are made and kept."""
        return self._reports is None and self._snapshots.complete == self._rules.steps

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def start(self) -> Sent:
        """Ask all servers what they have."""
        self._reports = {}
        return self._to_servers(ReportRequest(incarnation=self.incarnation))

    def receive(self, message: Any) -> Sent:
        """Of workers and servers."""
        match message:
            case Join():
                return self._join(message.worker)
            case Leave():
                return self._leave(message)
            case PushStaged():
                return self._staged(message)
            case Broken():
                return self._broken(message)
            case SnapshotKept():
                return self._kept(message)
            case Back():
                return self._back(message)
            case _:
                raise AssertionError(f"a head does not take {type(message).__name__}")

    def lost(self, worker: int) -> Sent:
        """The worker counts as gone. If it is alive it is asked to join again, and a push of it is refused.

        To be called after the messages of a connection that has ended: a `Join` that comes later counts.
        """
        self._joining.pop(worker, None)
        return [*self._remove(worker), (Address("worker", worker), Rejoin(ticket=None))]

    def _clear(self, ledger: Ledger, complete: int = -1) -> None:
        """No worker takes part. complete: the newest snapshot that all servers have."""
        self._leases = Leases(self._rules.staleness, ledger)
        self._joining: dict[int, None] = {}  # while servers are asked, in order
        self._snapshots = KeptSnapshots(self._rules.num_servers, complete)

    # --- Workers.

    def _join(self, worker: int) -> Sent:
        if worker in self._expelled:
            return [(Address("worker", worker), Done())]
        if self._reports is not None:
            self._joining[worker] = None
            return []
        sent = self._forget(worker) if worker in self._leases else []
        if self.finished:
            return [*sent, (Address("worker", worker), Done())]
        self._leases.add(worker)
        return sent + self._give_out()

    def _leave(self, message: Leave) -> Sent:
        worker = message.worker
        self._joining.pop(worker, None)
        if worker not in self._leases:
            return []
        pushed = message.pushed if message.incarnation == self.incarnation else None
        return [] if self._leases.leaves_after_push(worker, pushed) else self._remove(worker)

    def _remove(self, worker: int) -> Sent:
        """A worker goes, if it is here: its shares are given to others."""
        return self._forget(worker) + self._give_out() if worker in self._leases else []

    def _forget(self, worker: int) -> Sent:
        sent: Sent = []
        for ticket in self._leases.remove(worker):
            sent += self._to_servers(Drop(incarnation=self.incarnation, worker=worker, ticket=ticket))
        return sent

    def _give_out(self) -> Sent:
        sent: Sent = []
        for ticket, lease in self._leases.give_out(self.version, self._rules.steps):
            sent += self._to_servers(Give(incarnation=self.incarnation, ticket=ticket, **asdict(lease)))
        return sent

    # --- Pushes.

    def _staged(self, message: PushStaged) -> Sent:
        running = message.incarnation == self.incarnation and self._reports is None
        parts = self._leases.stage(message) if running else None
        if parts is None:
            return self._refuse(message)
        return self._apply(parts[0]) if len(parts) == self._rules.num_servers else []

    def _refuse(self, message: PushStaged) -> Sent:
        worker, ticket, current = message.worker, message.ticket, message.incarnation == self.incarnation
        drop = Drop(incarnation=message.incarnation, worker=worker, ticket=ticket)
        sent: Sent = [(Address("server", message.server), drop)]
        if message.server != 0:
            return sent
        if not (current and self._leases.is_applied(worker, ticket)):  # else it came twice
            self.refused += 1
        if worker not in self._leases and worker not in self._joining:  # else it has, or gets, another lease
            sent.append((Address("worker", worker), Rejoin(ticket=ticket)))
        return sent

    def _broken(self, message: Broken) -> Sent:
        worker = message.worker
        if worker in self._expelled:  # another server has said it of the same push
            return []
        self._expelled.add(worker)
        self._events.append(Expelled(worker=worker))
        self._joining.pop(worker, None)
        self.refused += 1
        return [*self._remove(worker), (Address("worker", worker), Done())]

    def _apply(self, push: PushStaged) -> Sent:
        worker, ticket = push.worker, push.ticket
        lease = self._leases.finish(ticket)
        age = self.version - lease.version
        self.version += 1
        self.ages[age] += 1
        what: Any = {"worker": worker, "version": self.version, "loss": push.loss, "norm": push.norm}
        self._events.append(Update(share=lease.share, age=age, gap=self._leases.clocks.gap, **what))
        rate = self._rules.rate(age)
        sent = self._to_servers(Apply(incarnation=self.incarnation, ticket=ticket, rate=rate, **what))
        if not self._leases.wait_again(worker):
            sent += self._forget(worker)
        if self._rules.keeps(self.version):
            sent += self._keep()
        return sent + self._give_out()

    # --- Snapshots.

    def _keep(self) -> Sent:
        state = _state(self._leases.ledger, self.ages)
        self._snapshots.begin(self.version, state)
        before = self._snapshots.complete
        keep = Keep(incarnation=self.incarnation, version=self.version, state=state, forget_before=before)
        return self._to_servers(keep)

    def _kept(self, message: SnapshotKept) -> Sent:
        current = message.incarnation == self.incarnation
        snapshot = self._snapshots.kept(message.version, message.server) if current else None
        if snapshot is None:
            return []
        self._events.append(snapshot)
        members = self._leases.clocks.workers if self.finished else []
        return [(Address("worker", worker), Done()) for worker in members]

    def _back(self, message: Back) -> Sent:
        if message.asked is None:  # it was started, again perhaps: whatever it had been sent is gone
            joining, members = self._joining, self._leases.clocks.workers
            if self._reports is None:
                self.incarnation += 1
            self._clear(Ledger())
            self._joining = joining
            return [(Address("worker", worker), Rejoin(ticket=None)) for worker in members] + self.start()
        if self._reports is None or message.asked != self.incarnation:
            return []
        self._reports[message.server] = message
        return self._restore(self._reports) if len(self._reports) == self._rules.num_servers else []

    def _restore(self, reports: dict[int, Back]) -> Sent:
        """Back to the newest snapshot that all servers have."""
        snapshot = newest_common(reports)
        version, state = snapshot.version, snapshot.state
        # it does at once what the head decides; others may not have gone back the last time yet
        lost = reports[0].newest - version
        joining = list(self._joining)
        self._clear(Ledger.of(state["ledger"]), version)
        self._reports = None
        self.version = version
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})
        self._events.append(Restored(version=version, lost=lost, incarnation=self.incarnation))
        self._events.append(snapshot)  # the head that took it may not have lived to hear so
        sent = self._to_servers(Restore(incarnation=self.incarnation, version=version))
        for worker in joining:
            sent += self._join(worker)
        return sent

    def _to_servers(self, message: Any) -> Sent:
        return [(Address("server", server), message) for server in range(self._rules.num_servers)]


def _state(ledger: Ledger, ages: Mapping[int, int]) -> dict[str, Any]:
    """What a snapshot keeps of the head, as JSON values."""
    return {
        "ledger": ledger.state(),
        "ages": {str(age): count for age, count in sorted(ages.items())},
    }
