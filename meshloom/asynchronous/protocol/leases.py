"""Which worker computes which share of the data, under which ticket, and which workers wait for one.

    add -> waiting -> give_out: a lease, with a ticket -> stage: parts of its push arrive -> finish -> waiting
                                                       -> remove: its share is free again

A ticket is used up by the update, so a push that arrives twice, or of a removed worker, is not found.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.asynchronous.protocol.clocks import Clocks
from meshloom.asynchronous.protocol.ledger import Ledger
from meshloom.asynchronous.protocol.messages import PushStaged


@dataclass(frozen=True, kw_only=True)
class Lease:
    """version: of the parameters at which `worker` computes `share`."""

    worker: int
    share: int
    version: int


class Leases:
    """staleness: bound of the clocks; None: no bound. ledger: of the shares."""

    def __init__(self, staleness: int | None, ledger: Ledger) -> None:
        self.clocks = Clocks(staleness)
        self.ledger = ledger
        self._waiting: dict[int, None] = {}  # for a share, or for slower workers, in order
        self._leaving: set[int] = set()  # once their push is applied
        self._by_ticket: dict[int, Lease] = {}
        self._parts: dict[int, dict[int, PushStaged]] = {}  # by ticket and server
        self._applied: dict[int, int] = {}  # each worker's newest ticket that became an update
        self._next_ticket = 0

    def __contains__(self, worker: int) -> bool:
        return worker in self.clocks

    def add(self, worker: int) -> None:
        """The worker waits for a share, at the clock of the slowest."""
        self.clocks.add(worker)
        self._waiting[worker] = None

    def remove(self, worker: int) -> list[int]:
        """Return the worker's shares to the ledger; the tickets of which some servers have parts."""
        self.clocks.remove(worker)
        self._waiting.pop(worker, None)
        self._leaving.discard(worker)
        staged: list[int] = []
        for ticket in [ticket for ticket, lease in self._by_ticket.items() if lease.worker == worker]:
            self.ledger.give_back(self._by_ticket.pop(ticket).share)
            if self._parts.pop(ticket, None):
                staged.append(ticket)
        return staged

    def leaves_after_push(self, worker: int, ticket: int | None) -> bool:
        """Whether the worker has pushed under a ticket that is out: then it leaves with that update."""
        lease = self._by_ticket.get(ticket) if ticket is not None else None
        if lease is None or lease.worker != worker:
            return False
        self._leaving.add(worker)
        return True

    def give_out(self, version: int, steps: int) -> list[tuple[int, Lease]]:
        """New leases, by ticket, to workers that wait, until there are as many as the run still needs. The
        slowest come first: the others wait for them.

        version: of the parameters. steps: updates of the whole run.
        """
        given: list[tuple[int, Lease]] = []
        # stable: workers at one clock in the order in which they came
        for worker in sorted(self._waiting, key=self.clocks.__getitem__):
            if version + len(self._by_ticket) >= steps or not self.clocks.may_begin(worker):
                break
            del self._waiting[worker]
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._by_ticket[ticket] = Lease(worker=worker, share=self.ledger.take(), version=version)
            given.append((ticket, self._by_ticket[ticket]))
        return given

    def stage(self, message: PushStaged) -> dict[int, PushStaged] | None:
        """The parts of this push so far, by server; None if its ticket is not out."""
        lease = self._by_ticket.get(message.ticket)
        if lease is None or lease.worker != message.worker:
            return None
        parts = self._parts.setdefault(message.ticket, {})
        parts[message.server] = message
        return parts

    def finish(self, ticket: int) -> Lease:
        """The push under this ticket is an update."""
        lease = self._by_ticket.pop(ticket)
        del self._parts[ticket]
        self._applied[lease.worker] = ticket
        self.clocks.advance(lease.worker)
        self.ledger.finish(lease.share)
        return lease

    def wait_again(self, worker: int) -> bool:
        """After an update, its worker waits for another share; False if it leaves."""
        if worker in self._leaving:
            return False
        self._waiting[worker] = None
        return True

    def is_applied(self, worker: int, ticket: int) -> bool:
        """Whether a push under this ticket, or a later one of the worker, is an update already."""
        return ticket <= self._applied.get(worker, -1)
