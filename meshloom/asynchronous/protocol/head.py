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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.asynchronous.protocol.clocks import Clocks
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
    SnapshotKind,
)

STARTS = 1 << 20  # incarnations that one start of a head may use: start n begins with n * STARTS


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update `version`: the gradient of `share` by `worker`. age: updates made since the parameters that it
    was computed at. gap: of the clocks then."""

    version: int
    worker: int
    share: int
    age: int
    loss: float
    norm: float
    gap: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All servers have kept their parts after update `version`. Said again when they go back to it."""

    version: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The servers are at update `version`, in a new incarnation; the `lost` updates after it are gone."""

    version: int
    lost: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Expelled:
    """A push of this worker was not finite: it is not applied, its share is given out again, and the worker
    is let go for good."""

    worker: int


Event = Update | Snapshot | Restored | Expelled


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


@dataclass(frozen=True, kw_only=True)
class _Lease:
    worker: int
    share: int
    version: int  # of the parameters that were given


def first_state() -> dict[str, Any]:
    """The head's state before the first update, as it stands in snapshot 0."""
    return {"ledger": Ledger().state(), "ages": {}}


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
        self._clear()
        self._ledger = Ledger()
        self._reports: dict[int, Back] | None = {}  # while servers are asked what they have; None: running

    @property
    def finished(self) -> bool:
        """All updates are made and kept."""
        return self._reports is None and self._complete == self._rules.steps

    @property
    def gap(self) -> int:
        """Between the clocks of the fastest and the slowest live worker."""
        return self._clocks.gap

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
        """The worker counts as gone. If it is not, it is told to join again, and a push that it still makes
        is refused.

        To be called after the messages of a connection that has ended, not before them: a `Join` that comes
        later counts.
        """
        self._joining.pop(worker, None)
        sent = self._forget(worker) + self._give_out() if worker in self._clocks else []
        return [*sent, (Address("worker", worker), Rejoin(ticket=None))]

    def _clear(self) -> None:
        """Nobody is here."""
        self._clocks = Clocks(self._rules.staleness)
        self._joining: dict[int, None] = {}  # while servers are asked, in order
        self._waiting: dict[int, None] = {}  # for a share, or for slower ones, in order
        self._leaving: set[int] = set()  # when their push is applied
        self._leases: dict[int, _Lease] = {}  # by ticket
        self._applied: dict[int, int] = {}  # each worker's newest ticket that became an update
        self._parts: dict[int, dict[int, PushStaged]] = {}  # by ticket and server
        self._tickets = 0
        self._keeping: dict[int, tuple[Any, set[int]]] = {}  # version -> the state, and who has kept it
        self._complete = -1  # the newest snapshot that all servers have

    # --- Workers.

    def _join(self, worker: int) -> Sent:
        if worker in self._expelled:
            return [(Address("worker", worker), Done())]
        if self._reports is not None:
            self._joining[worker] = None
            return []
        sent = self._forget(worker) if worker in self._clocks else []
        if self.finished:
            return [*sent, (Address("worker", worker), Done())]
        self._clocks.add(worker)
        self._waiting[worker] = None
        return sent + self._give_out()

    def _leave(self, message: Leave) -> Sent:
        worker = message.worker
        self._joining.pop(worker, None)
        if worker not in self._clocks:
            return []
        lease = self._leases.get(message.pushed) if message.incarnation == self.incarnation else None
        if lease is not None and lease.worker == worker:
            self._leaving.add(worker)
            return []
        return self._forget(worker) + self._give_out()

    def _forget(self, worker: int) -> Sent:
        """What the worker has goes back to the ledger."""
        self._clocks.remove(worker)
        self._waiting.pop(worker, None)
        self._leaving.discard(worker)
        sent: Sent = []
        for ticket in [ticket for ticket, lease in self._leases.items() if lease.worker == worker]:
            self._ledger.give_back(self._leases.pop(ticket).share)
            if self._parts.pop(ticket, None):
                sent += self._to_servers(Drop(incarnation=self.incarnation, worker=worker, ticket=ticket))
        return sent

    def _give_out(self) -> Sent:
        """Shares to whoever waits and may have one, the slowest first: it is the one others wait for."""
        sent: Sent = []
        # stable: those of one clock in the order they came
        for worker in sorted(self._waiting, key=self._clocks.__getitem__):
            if self.version + len(self._leases) >= self._rules.steps or not self._clocks.may_begin(worker):
                break
            del self._waiting[worker]
            lease = _Lease(worker=worker, share=self._ledger.take(), version=self.version)
            ticket, self._tickets = self._tickets, self._tickets + 1
            self._leases[ticket] = lease
            sent += self._to_servers(
                Give(
                    incarnation=self.incarnation,
                    worker=worker,
                    ticket=ticket,
                    share=lease.share,
                    version=self.version,
                )
            )
        return sent

    # --- Pushes.

    def _staged(self, message: PushStaged) -> Sent:
        lease = self._leases.get(message.ticket) if message.incarnation == self.incarnation else None
        if lease is None or lease.worker != message.worker or self._reports is not None:
            return self._refuse(message)
        parts = self._parts.setdefault(message.ticket, {})
        parts[message.server] = message
        return self._apply(message.ticket, lease, parts[0]) if len(parts) == self._rules.num_servers else []

    def _refuse(self, message: PushStaged) -> Sent:
        sent: Sent = [
            (
                Address("server", message.server),
                Drop(incarnation=message.incarnation, worker=message.worker, ticket=message.ticket),
            )
        ]
        # it came twice
        again = message.incarnation == self.incarnation and message.ticket <= self._applied.get(
            message.worker, -1
        )
        if message.server == 0 and not again:
            self.refused += 1
        # else it has, or gets, another lease
        if message.server == 0 and message.worker not in self._clocks and message.worker not in self._joining:
            sent.append((Address("worker", message.worker), Rejoin(ticket=message.ticket)))
        return sent

    def _broken(self, message: Broken) -> Sent:
        worker = message.worker
        if worker in self._expelled:  # another server has said it of the same push
            return []
        self._expelled.add(worker)
        self._events.append(Expelled(worker=worker))
        self._joining.pop(worker, None)
        self.refused += 1
        sent = self._forget(worker) + self._give_out() if worker in self._clocks else []
        return [*sent, (Address("worker", worker), Done())]

    def _apply(self, ticket: int, lease: _Lease, push: PushStaged) -> Sent:
        worker, age = lease.worker, self.version - lease.version
        del self._leases[ticket], self._parts[ticket]
        self._applied[worker] = ticket
        self.version += 1
        self._clocks.advance(worker)
        self._ledger.finish(lease.share)
        self.ages[age] += 1
        self._events.append(
            Update(
                version=self.version,
                worker=worker,
                share=lease.share,
                age=age,
                loss=push.loss,
                norm=push.norm,
                gap=self._clocks.gap,
            )
        )
        sent = self._to_servers(
            Apply(
                incarnation=self.incarnation, worker=worker, ticket=ticket, version=self.version,
                loss=push.loss, norm=push.norm, rate=self._rules.rate(age),
            )
        )  # fmt: skip
        if worker in self._leaving:
            sent += self._forget(worker)
        else:
            self._waiting[worker] = None
        if self._rules.keeps(self.version):
            sent += self._keep()
        return sent + self._give_out()

    # --- Snapshots.

    def _keep(self) -> Sent:
        state = {
            "ledger": self._ledger.state(),
            "ages": {str(age): count for age, count in sorted(self.ages.items())},
        }
        self._keeping[self.version] = state, set()
        return self._to_servers(
            Keep(
                incarnation=self.incarnation, version=self.version, state=state, forget_before=self._complete
            )
        )

    def _kept(self, message: SnapshotKept) -> Sent:
        if message.incarnation != self.incarnation or message.version not in self._keeping:
            return []
        state, servers = self._keeping[message.version]
        servers.add(message.server)
        if len(servers) < self._rules.num_servers:
            return []
        del self._keeping[message.version]
        self._complete = message.version
        self._events.append(Snapshot(version=message.version, state=state))
        return self._dismiss() if self.finished else []

    def _dismiss(self) -> Sent:
        return [(Address("worker", worker), Done()) for worker in self._clocks.workers]

    def _back(self, message: Back) -> Sent:
        if message.asked is None:  # it was started, again perhaps: whatever it had been sent is gone
            joining, members = self._joining, self._clocks.workers
            if self._reports is None:
                self.incarnation += 1
            self._clear()
            self._joining = joining
            return [(Address("worker", worker), Rejoin(ticket=None)) for worker in members] + self.start()
        if self._reports is None or message.asked != self.incarnation:
            return []
        self._reports[message.server] = message
        return self._restore(self._reports) if len(self._reports) == self._rules.num_servers else []

    def _restore(self, reports: dict[int, Back]) -> Sent:
        """Back to the newest snapshot that all servers have."""
        others = [report.snapshots for report in reports.values()]

        def everywhere(version: int, kind: SnapshotKind) -> bool:
            return all(version in each and each[version].incarnation == kind.incarnation for each in others)

        version = max(version for version, kind in reports[0].snapshots.items() if everywhere(version, kind))
        state = reports[0].snapshots[version].state
        # it does at once what the head decides; others may not have gone back the last time yet
        lost = reports[0].newest - version
        joining = list(self._joining)
        self._clear()
        self._reports = None
        self.version = self._complete = version
        self._ledger = Ledger.of(state["ledger"])
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})
        self._events.append(Restored(version=version, lost=lost, incarnation=self.incarnation))
        # the head that took it may not have lived to hear so
        self._events.append(Snapshot(version=version, state=state))
        sent = self._to_servers(Restore(incarnation=self.incarnation, version=version))
        for worker in joining:
            sent += self._join(worker)
        return sent

    def _to_servers(self, message: Any) -> Sent:
        return [(Address("server", server), message) for server in range(self._rules.num_servers)]
