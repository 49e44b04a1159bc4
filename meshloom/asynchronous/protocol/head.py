"""The head of an asynchronous run: it decides who computes which share, and the order of all pushes.

    worker --Push--> servers --PushStaged--> head   when all servers have their part, the push is update n
                                                    (exactly once: its ticket is used up)
    head --Apply n, SendParameters--> servers --ParametersPart--> worker   (all parts are of one version)

Servers execute the head's messages in order, so the parts that a worker gets from several servers are of one
version, and several servers compute what one server would. A push whose ticket is not out (its worker counts
as lost, the servers were restored, the message arrived twice) is refused, and dropped by all servers.

When a killed server restarts, all servers go back to the newest snapshot that all of them have: there is one
history. The updates after it are lost together, and their shares of the data are free again. A head that
starts knows only what servers report, so starting, resuming and recovering are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshloom.asynchronous.protocol.events import (
    Event,
    Expelled,
    KeptSnapshots,
    Restored,
    Snapshot,
    Update,
    newest_common,
)
from meshloom.asynchronous.protocol.leases import Leases
from meshloom.asynchronous.protocol.ledger import Ledger
from meshloom.asynchronous.protocol.messages import (
    Address,
    Apply,
    Done,
    DropPush,
    Join,
    Leave,
    NotFinitePush,
    PushStaged,
    Rejoin,
    ReportRequest,
    Restore,
    SendParameters,
    Sent,
    ServerReport,
    SnapshotKept,
    TakeSnapshot,
)

STARTS = 1 << 20  # incarnations per start of a head: start n begins with n * STARTS


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a run.

    num_servers: 1 or more. staleness: bound of the clocks; None: no bound. steps: updates of the whole run.
    keep_every: a snapshot is taken after each multiple of one of these many updates, and after the last.
    rate_by_age: learning rates are divided by the age of the gradient's parameters (Zhang et al., 2016).
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
        """The factor of learning rates."""
        return 1.0 / max(1, age) if self.rate_by_age else 1.0


def first_state() -> dict[str, Any]:
    """The head's state before the first update, as it stands in snapshot 0."""
    return _state(Ledger(), {})


class Head:
    """incarnation: larger than any of an earlier head of this run; it counts up from there."""

    def __init__(self, rules: Rules, incarnation: int = 0) -> None:
        self._rules = rules
        self.incarnation = incarnation
        self.version = -1
        self.ages: Counter[int] = Counter()
        self.refused = 0  # pushes
        self._events: list[Event] = []
        self._expelled: set[int] = set()  # their pushes would be refused again and again
        self._clear(Ledger())
        self._reports: dict[int, ServerReport] | None = {}  # while servers report; None: running

    @property
    def finished(self) -> bool:
        """Whether all updates are done, and in a snapshot."""
        return self._reports is None and self._snapshots.complete == self._rules.steps

    def ask_for_snapshot(self) -> Sent | None:
        """Take a snapshot of the newest update, whatever is due. None: not now, as servers report."""
        if self._reports is not None:
            return None
        newest = self._snapshots.newest
        self._events += [newest] if newest and newest.version == self.version else []
        return [] if self._snapshots.has(self.version) else self._keep()

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def start(self) -> Sent:
        """Ask all servers for reports."""
        self._reports = {}
        return self._to_servers(ReportRequest(incarnation=self.incarnation))

    def receive(self, message: Any) -> Sent:
        """A message of a worker or server."""
        match message:
            case Join():
                return self._join(message.worker)
            case Leave():
                return self._leave(message)
            case PushStaged():
                return self._staged(message)
            case NotFinitePush():
                return self._broken(message)
            case SnapshotKept():
                return self._kept(message)
            case ServerReport():
                return self._back(message)
            case _:
                raise AssertionError(f"a head does not take {type(message).__name__}")

    def lost(self, worker: int) -> Sent:
        """The worker counts as gone; if it is alive, it is asked to join again and its push is refused. To be
        called after the messages of a connection that has ended: a later `Join` counts."""
        self._joining.pop(worker, None)
        return [*self._remove(worker), (Address("worker", worker), Rejoin(ticket=None))]

    def _clear(self, ledger: Ledger, newest: Snapshot | None = None) -> None:
        """No worker takes part. newest: the newest snapshot that all servers have."""
        self._leases = Leases(self._rules.staleness, ledger)
        self._joining: dict[int, None] = {}  # while servers are asked, in order
        self._snapshots = KeptSnapshots(self._rules.num_servers, newest)

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
            sent += self._to_servers(DropPush(incarnation=self.incarnation, worker=worker, ticket=ticket))
        return sent

    def _give_out(self) -> Sent:
        sent: Sent = []
        for ticket, lease in self._leases.give_out(self.version, self._rules.steps):
            of = {"incarnation": self.incarnation, "ticket": ticket}
            sent += self._to_servers(SendParameters(**of, **asdict(lease)))
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
        drop = DropPush(incarnation=message.incarnation, worker=worker, ticket=ticket)
        sent: Sent = [(Address("server", message.server), drop)]
        if message.server != 0:
            return sent
        if not (current and self._leases.is_applied(worker, ticket)):  # else it came twice
            self.refused += 1
        if worker not in self._leases and worker not in self._joining:  # else it has, or gets, another lease
            sent.append((Address("worker", worker), Rejoin(ticket=ticket)))
        return sent

    def _broken(self, message: NotFinitePush) -> Sent:
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
        of = {"incarnation": self.incarnation, "version": self.version}
        return self._to_servers(TakeSnapshot(**of, state=state, forget_before=self._snapshots.complete))

    def _kept(self, message: SnapshotKept) -> Sent:
        current = message.incarnation == self.incarnation
        snapshot = self._snapshots.kept(message.version, message.server) if current else None
        if snapshot is None:
            return []
        self._events.append(snapshot)
        members = self._leases.clocks.workers if self.finished else []
        return [(Address("worker", worker), Done()) for worker in members]

    def _back(self, message: ServerReport) -> Sent:
        if message.asked is None:  # it has started, perhaps again: messages to it before are lost
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

    def _restore(self, reports: dict[int, ServerReport]) -> Sent:
        """Go back to the newest snapshot that all servers have."""
        snapshot = newest_common(reports)
        version, state = snapshot.version, snapshot.state
        # server 0 executes the head's decisions immediately; others may still be at an earlier history
        lost = reports[0].newest - version
        joining = list(self._joining)
        self._clear(Ledger.of(state["ledger"]), snapshot)
        self._reports, self.version = None, version
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})
        # the head that took the snapshot may not have lived to hear so
        self._events += [Restored(version=version, lost=lost, incarnation=self.incarnation), snapshot]
        sent = self._to_servers(Restore(incarnation=self.incarnation, version=version))
        return sent + [each for worker in joining for each in self._join(worker)]

    def _to_servers(self, message: Any) -> Sent:
        return [(Address("server", server), message) for server in range(self._rules.num_servers)]


def _state(ledger: Ledger, ages: Mapping[int, int]) -> dict[str, Any]:
    """What a snapshot keeps of the head, as JSON values."""
    return {"ledger": ledger.state(), "ages": {str(age): count for age, count in sorted(ages.items())}}
