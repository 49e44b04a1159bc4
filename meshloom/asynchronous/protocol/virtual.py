"""Runs workers, servers and the head on a virtual clock, reproducible bit for bit.

Events wait in a queue, by time and then by the order in which they were caused. Only computing a share and
sending a message between two processes take time. Messages between two processes arrive in order; those on
their way to a killed process are lost.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from meshloom.asynchronous.protocol.circumstances import Circumstances, Incident
from meshloom.asynchronous.protocol.events import Event
from meshloom.asynchronous.protocol.head import Head
from meshloom.asynchronous.protocol.messages import HEAD, Address, Done, Sent
from meshloom.asynchronous.protocol.store import Store
from meshloom.asynchronous.protocol.worker import Computed, Task, Worker
from meshloom.core.errors import TrainingError
from meshloom.core.random import derive


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How a cluster creates its machines. store: from a server's number. compute: a worker's task; called
    when the worker is done with it."""

    head: Callable[[], Head]
    store: Callable[[int], Store]
    compute: Callable[[int, Task], Computed]


class VirtualCluster:
    """num_workers: at the start. seconds: the time. busy: each worker's seconds on finished shares."""

    def __init__(
        self, parts: Parts, circumstances: Circumstances, *, num_servers: int, num_workers: int
    ) -> None:
        self.seconds = 0.0
        self.busy: defaultdict[int, float] = defaultdict(float)
        # seconds from each worker's joining to its end
        self.present: defaultdict[int, float] = defaultdict(float)
        self.head: Head = parts.head()
        self._parts = parts
        self._circumstances = circumstances
        self._num_servers = num_servers
        self._stores: dict[int, Store] = {}
        self._workers: dict[int, Worker] = {}
        self._since: dict[int, float] = {}  # when the worker came
        # of each process; a message does not reach a later start
        self._starts: Counter[Address] = Counter()
        # when the newest message from one process arrives at the other
        self._last: dict[tuple[Address, Address], float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._draws = count()
        self._at(0.0, self._start_servers)
        for worker in range(num_workers):
            self._at(0.0, partial(self._start_worker, worker))
        for incident in circumstances.incidents:
            self._at(incident.at_seconds, partial(self._happen, incident))

    def ask_for_snapshot(self) -> None:
        """Have a snapshot taken of the newest update, whatever is due; to be called after an update."""
        self._send(Address("server", 0), self.head.ask_for_snapshot())

    def run(self) -> Iterator[Event]:
        """Until all updates are done and in a snapshot, and the workers have ended; yields events."""
        while self._queue:
            self.seconds, _, action = heapq.heappop(self._queue)
            action()
            yield from self.head.take_events()
        if not self.head.finished:
            raise TrainingError(
                f"After update {max(self.head.version, 0)}, at {self.seconds:g} s, no worker is left and none will join, so nothing more can happen. "
                "Leave fewer incidents, or let a worker join."
            )
        for worker in list(self._workers):
            self._gone(worker)

    # --- Processes.

    def _start_servers(self) -> None:
        self.head = self._parts.head()
        for server in range(self._num_servers):
            self._starts[Address("server", server)] += 1
            self._stores[server] = self._parts.store(server)
        for server, store in self._stores.items():
            self._send(Address("server", server), store.started())
        for worker in self._workers.values():
            self._reconnect(worker)

    def _start_worker(self, number: int) -> None:
        if number in self._workers:
            return
        self._starts[Address("worker", number)] += 1
        self._since[number] = self.seconds
        self._workers[number] = Worker(number, self._num_servers)
        self._connect(self._workers[number])

    def _connect(self, worker: Worker) -> None:
        self._from_worker(worker, worker.connected())

    def _reconnect(self, worker: Worker) -> None:
        """After what servers have sent it, the worker has a new connection."""
        process = Address("worker", worker.number)
        self._later(Address("server", 0), process, partial(self._connect, worker))

    def _gone(self, number: int) -> None:
        del self._workers[number]
        self.present[number] += self.seconds - self._since[number]

    def _happen(self, incident: Incident) -> None:
        if self.head.finished:
            return
        number = incident.number
        if incident.what == "join":
            self._start_worker(number)
        elif incident.what == "server":
            if number in self._stores:  # all servers end and start together
                self._stores.clear()
                self._at(self.seconds + incident.away_seconds, self._start_servers)
        elif number in self._workers:
            worker = self._workers[number]
            if incident.what == "leave":
                self._from_worker(worker, worker.leave())
            else:
                if incident.what == "kill":
                    self._gone(number)
                self._notice(number, self.seconds + self._circumstances.notice_seconds)

    def _notice(self, worker: int, seconds: float) -> None:
        """The head hears that the worker's connection has ended, and not before it hears what was said."""
        start = self._starts[Address("worker", worker)]

        def lost() -> None:
            if 0 not in self._stores or self._starts[Address("worker", worker)] != start:
                return  # it has joined anew since
            self._send(Address("server", 0), self.head.lost(worker))
            if worker in self._workers:
                self._reconnect(self._workers[worker])

        said = self._last.get((Address("worker", worker), Address("server", 0)), 0.0)
        self._at(max(seconds, said), lost)

    # --- Messages.

    def _from_worker(self, worker: Worker, sent: Sent, *, told: bool = False) -> None:
        """Send what a worker says, and let it begin or end what it should. told: whether the head lets it end."""
        if self._workers.get(worker.number) is not worker:
            return
        self._send(Address("worker", worker.number), sent)
        if worker.ended:
            self._gone(worker.number)
            if not told:
                self._notice(worker.number, self.seconds)

    def _begin(self, worker: Worker, task: Task) -> None:
        seconds = self._varied(self._circumstances.seconds_of(worker.number))

        def done() -> None:
            if self._workers.get(worker.number) is not worker or worker.task is not task:
                return
            self.busy[worker.number] += seconds
            self._from_worker(worker, worker.computed(self._parts.compute(worker.number, task)))
            if worker.task:
                self._begin(worker, worker.task)

        self._at(self.seconds + seconds, done)

    def _send(self, source: Address, messages: Sent) -> None:
        """source: the process that sends. What it says to itself is done at once, in order."""
        waiting = list(messages)
        while waiting:
            address, message = waiting.pop(0)
            process = _process(address)
            if process == source:
                waiting += self._handle(address, message)
                continue
            self._later(source, process, partial(self._deliver, address, message))

    def _later(self, source: Address, process: Address, action: Callable[[], None]) -> None:
        """When a message from `source` arrives at `process`, unless that is killed before."""
        arrives = self.seconds + self._varied(self._circumstances.latency_seconds)
        at = max(arrives, self._last.get((source, process), 0.0))
        self._last[source, process] = at
        start = self._starts[process]
        self._at(at, lambda: action() if self._starts[process] == start and self._is_there(process) else None)

    def _deliver(self, address: Address, message: Any) -> None:
        if address.kind != "worker":
            self._send(_process(address), self._handle(address, message))
            return
        worker = self._workers[address.number]
        was_busy = worker.task is not None
        self._from_worker(worker, worker.receive(message), told=isinstance(message, Done))
        if worker.task and not was_busy:
            self._begin(worker, worker.task)

    def _handle(self, address: Address, message: Any) -> Sent:
        receiver = self.head if address == HEAD else self._stores[address.number]
        return receiver.receive(message)

    def _is_there(self, process: Address) -> bool:
        return process.number in (self._stores if process.kind == "server" else self._workers)

    def _varied(self, seconds: float) -> float:
        if not self._circumstances.jitter or not seconds:
            return seconds
        drawn = derive(0, "jitter", next(self._draws)) / 2**62 - 1  # from -1 to 1
        return seconds * (1 + self._circumstances.jitter * drawn)

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (seconds, next(self._numbers), action))


def _process(address: Address) -> Address:
    return Address("server", 0) if address == HEAD else address
