"""Which worker computes which share of the data, and which workers wait for one.

    add -> waiting -> give_out: a lease -> stage: parts of its push arrive -> finish -> waiting
                                        -> remove: its share is lost

A share is given out once in a run, whatever becomes of it, so a push of a removed worker is not found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshloom.asynchronous.protocol.clocks import Clocks
from meshloom.asynchronous.protocol.messages import PushStaged


@dataclass(frozen=True, kw_only=True)
class Lease:
    """version: of the parameters at which `worker` computes its share. parts: of its push, by server."""

    worker: int
    version: int
    parts: dict[int, PushStaged] = field(default_factory=dict)


class Leases:
    """staleness: bound of the clocks; None: no bound. next_share: the first that was not given out."""

    def __init__(self, staleness: int | None, next_share: int) -> None:
        self.clocks = Clocks(staleness)
        self.next_share = next_share
        self._waiting: dict[int, None] = {}  # for a share, or for slower workers, in order
        self._leaving: set[int] = set()  # once their push is applied
        self._by_share: dict[int, Lease] = {}

    @property
    def first_open(self) -> int:
        """The first share after all those that became updates or are lost: a resumed run begins with it."""
        share = self.next_share
        while share - 1 in self._by_share:
            share -= 1
        return share

    def __contains__(self, worker: int) -> bool:
        return worker in self.clocks

    def add(self, worker: int) -> None:
        """The worker waits for a share, at the clock of the slowest."""
        self.clocks.add(worker)
        self._waiting[worker] = None

    def remove(self, worker: int) -> list[int]:
        """The worker is gone, and its shares are lost: those of which some servers have parts."""
        self.clocks.remove(worker)
        self._waiting.pop(worker, None)
        self._leaving.discard(worker)
        lost = [share for share, lease in self._by_share.items() if lease.worker == worker]
        return [share for share in lost if self._by_share.pop(share).parts]

    def leaves(self, worker: int) -> bool:
        """The worker gets no further share. Whether it has one: then it leaves with that update."""
        self._waiting.pop(worker, None)
        self._leaving.add(worker)
        return any(lease.worker == worker for lease in self._by_share.values())

    def give_out(self, version: int, steps: int) -> list[tuple[int, Lease]]:
        """New leases, by share, to workers that wait, until there are as many as the run still needs. The
        slowest come first: the others wait for them.

        version: of the parameters. steps: updates of the whole run.
        """
        given: list[tuple[int, Lease]] = []
        # stable: workers at one clock in the order in which they came
        for worker in sorted(self._waiting, key=self.clocks.__getitem__):
            if version + len(self._by_share) >= steps or not self.clocks.may_begin(worker):
                break
            del self._waiting[worker]
            share, self.next_share = self.next_share, self.next_share + 1
            self._by_share[share] = Lease(worker=worker, version=version)
            given.append((share, self._by_share[share]))
        return given

    def stage(self, message: PushStaged) -> dict[int, PushStaged] | None:
        """The parts of this push so far, by server; None if its share is not out."""
        lease = self._by_share.get(message.share)
        if lease is None or lease.worker != message.worker:
            return None
        lease.parts[message.server] = message
        return lease.parts

    def finish(self, share: int) -> Lease:
        """The push of this share is an update."""
        lease = self._by_share.pop(share)
        self.clocks.advance(lease.worker)
        return lease

    def wait_again(self, worker: int) -> bool:
        """After an update, its worker waits for another share; False if it leaves."""
        if worker in self._leaving:
            return False
        self._waiting[worker] = None
        return True
