"""The head of an asynchronous run: it decides who computes which share, and the order of all pushes.

    worker --Push--> servers --PushStaged--> head   when all servers have their part, the push is update n
    head --Apply n, SendParameters--> servers --ParametersPart--> worker   (all parts are of one version)

Servers execute the head's messages in order, so the parts that a worker gets from several servers are of one
version, and several servers compute what one server would. A push whose share is not out (its worker counts
as lost) is refused, and dropped by all servers.

Servers and head start and end together. They go on from the newest snapshot that all of them have: there is
one history. The updates after it are lost together, and their shares are not given out again. A head that
starts knows only what servers report, so starting, resuming and recovering are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.asynchronous.protocol.events import (
    Event,
    KeptSnapshots,
    Restored,
    Snapshot,
    Update,
    newest_common,
)
from meshloom.asynchronous.protocol.leases import Leases
from meshloom.asynchronous.protocol.messages import (
    Address,
    Apply,
    Done,
    DropPush,
    Join,
    Leave,
    PushStaged,
    Restore,
    SendParameters,
    Sent,
    ServerReport,
    SnapshotKept,
    TakeSnapshot,
)


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
    return head_state(0, {})


def head_state(next_share: int, ages: Mapping[int, int]) -> dict[str, Any]:
    """What a snapshot keeps of the head, as JSON values. next_share: where a run that is resumed from it begins."""
    return {"next_share": next_share, "ages": {str(age): count for age, count in sorted(ages.items())}}


class Head:
    """version: of the newest update; -1 until all servers have reported."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.version = -1
        self.ages: Counter[int] = Counter()
        self._events: list[Event] = []
        self._reports: dict[int, ServerReport] = {}
        self._joining: dict[int, None] = {}  # while servers report, in order
        self._leases = Leases(rules.staleness, 0)
        self._snapshots = KeptSnapshots(rules.num_servers, Snapshot(version=-1, state=None))

    @property
    def finished(self) -> bool:
        """Whether all updates are done, and in a snapshot."""
        return self._snapshots.newest.version == self._rules.steps

    def ask_for_snapshot(self) -> Sent:
        """Take a snapshot of the newest update, whatever is due; to be called after an update."""
        newest = self._snapshots.newest
        self._events += [newest] if newest.version == self.version else []
        return [] if self._snapshots.has(self.version) else self._keep()

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def receive(self, message: Any) -> Sent:
        """A message of a worker or server."""
        match message:
            case Join():
                return self._join(message.worker)
            case Leave():
                return self._leave(message.worker)
            case PushStaged():
                return self._staged(message)
            case SnapshotKept():
                return self._kept(message)
            case ServerReport():
                return self._reported(message)
            case _:
                raise AssertionError(f"a head does not take {type(message).__name__}")

    def lost(self, worker: int) -> Sent:
        """The worker counts as gone, and its push is refused; if it is alive, it connects and joins again. To be
        called after the messages of a connection that has ended: a later `Join` counts."""
        self._joining.pop(worker, None)
        return self._forget(worker) + self._give_out() if worker in self._leases else []

    # --- Workers.

    def _join(self, worker: int) -> Sent:
        if self.version < 0:
            self._joining[worker] = None
            return []
        sent = self._forget(worker) if worker in self._leases else []
        if self.finished:
            return [*sent, (Address("worker", worker), Done())]
        self._leases.add(worker)
        return sent + self._give_out()

    def _leave(self, worker: int) -> Sent:
        if worker in self._leases and self._leases.leaves(worker):
            return []
        return [*self.lost(worker), (Address("worker", worker), Done())]

    def _forget(self, worker: int) -> Sent:
        sent: Sent = []
        for share in self._leases.remove(worker):
            sent += self._to_servers(DropPush(share=share))
        return sent

    def _give_out(self) -> Sent:
        sent: Sent = []
        for share, lease in self._leases.give_out(self.version, self._rules.steps):
            sent += self._to_servers(SendParameters(worker=lease.worker, share=share, version=lease.version))
        return sent

    # --- Pushes.

    def _staged(self, message: PushStaged) -> Sent:
        parts = self._leases.stage(message)
        if parts is None:
            return [(Address("server", message.server), DropPush(share=message.share))]
        return self._apply(parts[0]) if len(parts) == self._rules.num_servers else []

    def _apply(self, push: PushStaged) -> Sent:
        worker = push.worker
        age = self.version - self._leases.finish(push.share).version
        self.version += 1
        self.ages[age] += 1
        update = Update(
            version=self.version, worker=worker, share=push.share, age=age, loss=push.loss, norm=push.norm,
            gap=self._leases.clocks.gap,
        )  # fmt: skip
        self._events.append(update)
        sent = self._to_servers(Apply(share=push.share, rate=self._rules.rate(age)))
        if not self._leases.wait_again(worker):
            sent += [*self._forget(worker), (Address("worker", worker), Done())]
        if self._rules.keeps(self.version):
            sent += self._keep()
        return sent + self._give_out()

    # --- Snapshots.

    def _keep(self) -> Sent:
        state = head_state(self._leases.first_open, self.ages)
        self._snapshots.begin(self.version, state)
        before = self._snapshots.newest.version
        return self._to_servers(TakeSnapshot(version=self.version, state=state, forget_before=before))

    def _kept(self, message: SnapshotKept) -> Sent:
        snapshot = self._snapshots.kept(message.version, message.server)
        if snapshot is None:
            return []
        self._events.append(snapshot)
        members = self._leases.clocks.workers if self.finished else []
        return [(Address("worker", worker), Done()) for worker in members]

    def _reported(self, message: ServerReport) -> Sent:
        """Go on from the newest snapshot that all servers have, once all have reported."""
        self._reports[message.server] = message
        if len(self._reports) < self._rules.num_servers:
            return []
        snapshot = newest_common(self._reports)
        version, state = snapshot.version, snapshot.state
        given_out = [report.next_share for report in self._reports.values()]
        self._leases.next_share = max(state["next_share"], *given_out)
        self._snapshots = KeptSnapshots(self._rules.num_servers, snapshot)
        self.version = version
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})
        # the head that took the snapshot may not have lived to hear so
        self._events += [Restored(version=version), snapshot]
        sent = self._to_servers(Restore(version=version))
        return sent + [each for worker in self._joining for each in self._join(worker)]

    def _to_servers(self, message: Any) -> Sent:
        return [(Address("server", server), message) for server in range(self._rules.num_servers)]
