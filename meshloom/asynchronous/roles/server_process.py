"""A server's process: it carries messages between workers, its store and the head, which runs in server 0.

    workers <-Endpoint-> server 0: head, store <-Endpoint, other keys-> server k: store <-Endpoint-> workers

Events are reported to the launcher, which shows them, evaluates and saves. Senseless messages of peers are
refused and counted, and have no other effect. A server that loses another ends: the launcher starts all anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from meshloom.asynchronous.messaging.codec import (
    FROM_SERVERS,
    FROM_WORKERS,
    TO_SERVERS,
    TO_WORKERS,
    decode,
    limits_for,
    send_or_drop,
)
from meshloom.asynchronous.messaging.handshake import Ask, Hello, Welcome, WorkerSeconds
from meshloom.asynchronous.protocol.head import Head
from meshloom.asynchronous.protocol.messages import (
    HEAD,
    Address,
    Join,
    Leave,
    ParametersPart,
    Push,
    PushStaged,
    Sent,
    ServerReport,
    SnapshotKept,
)
from meshloom.asynchronous.protocol.store import Storage, Store
from meshloom.asynchronous.roles.admitted_workers import AdmittedWorkers
from meshloom.asynchronous.roles.reports import Reports, SendEvent
from meshloom.asynchronous.roles.served_job import ServedJob
from meshloom.asynchronous.state.parameters import Content, Parameters
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.snapshots import ASK_FOR_SNAPSHOT, MappedNumbers, SnapshotFiles
from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.endpoint import Endpoint
from meshloom.comm.messaging.keys import read_server_key, read_worker_key
from meshloom.comm.messaging.sockets import Joined, Lost, ReceivedMessage, SocketLimits
from meshloom.core.errors import MessageError, PeerLostError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.processes.elastic import HEAD_KEYS, SERVER_KEY
from meshloom.launch.role import Role

_LOOK_SECONDS = 0.1  # between looks at signals
_LAST_WORDS_SECONDS = 0.5  # how long workers that leave have for their last messages
_FOR_SERVERS = SocketLimits(queue_messages=10_000)  # workers are sent one share at a time, and little else


class ServerProcess:
    """stop: signals that ask this process to end. send_event: reports to the launcher."""

    def __init__(
        self, role: Role, job: Job, plan: Plan, settings: AsynchronousSettings, stop: Sequence[int],
        send_event: SendEvent,
    ) -> None:  # fmt: skip
        self._role, self._job, self._plan, self._stop = role, job, plan, stop
        self._number = role.number
        self._served = served = ServedJob(role, job, plan, settings)
        directory = role.path / f"server-{self._number}"
        files = SnapshotFiles(directory, (served.start.version, *served.first))
        self._numbers = MappedNumbers(directory / "numbers")
        self._storage = Storage(snapshots=files, next_share=self._numbers.next_share)
        self._asked = False  # whether the head was asked for a snapshot, as the run is to end
        self._store = Store(self._number, self._storage, self._hold)
        first = self._number == 0
        self._head = Head(settings.rules(job, plan)) if first else None
        self._workers = AdmittedWorkers(served.digest, self._numbers if first else None)
        self._servers: dict[int, int] = {}  # server -> its peer, of server 0
        self._reports = Reports(send_event, role.path, plan.servers, job, settings)

    def run(self) -> None:
        """Until a signal asks it to end."""
        role = self._role
        with ExitStack() as stack:
            stack.callback(self._numbers.close)
            limits = limits_for(FROM_WORKERS | TO_WORKERS, [self._served.state])
            address, key = role.addresses[self._number], read_server_key(role.path / SERVER_KEY)
            self._outer = stack.enter_context(Endpoint(address, key, limits, listening=role.listening[0]))
            self._inner: Endpoint | Connections | None = None
            if self._plan.servers > 1:
                self._inner = stack.enter_context(_between_servers(role, is_head=self._head is not None))
            self._reports.serving()
            if self._head is not None:
                self._send(self._store.started())
            while not self._stop:
                self._wait()
                self._look()
            deadline = time.monotonic() + _LAST_WORDS_SECONDS
            while len(self._workers) and time.monotonic() < deadline:
                self._wait()
                self._look()
            self._report_counts(now=True)

    def _wait(self) -> None:
        poller = zmq.Poller()
        for each in (*self._outer.sockets, *(self._inner.sockets if self._inner is not None else ())):
            poller.register(each, zmq.POLLIN)
        poller.poll(round(_LOOK_SECONDS * 1000))

    def _look(self) -> None:
        for event in self._outer.poll(0.0):
            match event:
                case ReceivedMessage():
                    self._from_worker(event)
                case Lost(peer):
                    self._lose_worker(peer)
                case Joined():
                    pass  # its Hello follows
        if self._inner is not None:
            for event in self._inner.poll(0.0):
                match event:
                    case ReceivedMessage():
                        self._from_server(event)
                    case Lost():
                        if not self._stop:
                            raise PeerLostError(f"server {self._number} has lost its connection to another")
                    case Joined(peer):
                        if self._head is None:
                            self._servers = {0: peer}
                            self._send(self._store.started())
        if self._head is not None:
            self._ask_for_snapshot(self._head)
            self._reports.events(self._head, self._served.learning_rates)
        self._report_counts()

    def _ask_for_snapshot(self, head: Head) -> None:
        """Once, when the launcher wants one."""
        self._reports.asked = self._reports.asked or (self._role.path / ASK_FOR_SNAPSHOT).exists()
        if not self._reports.asked or head.version <= self._served.start.version:
            return
        if not self._asked:
            self._asked = True
            self._send(head.ask_for_snapshot())

    def _report_counts(self, now: bool = False) -> None:
        self._reports.counts(self._outer.refused, now=now)

    # --- Workers.

    def _from_worker(self, event: ReceivedMessage) -> None:
        try:
            message = decode(event.header, event.tensors, self._served.state)
            worker = self._workers.worker(event.peer)
            if isinstance(message, Ask) and self._head is not None:
                send_or_drop(self._outer, event.peer, self._served.description)
            elif isinstance(message, Hello):
                self._welcome(event.peer, message)
            elif isinstance(message, WorkerSeconds | Join | Leave | Push) and message.worker == worker:
                self._take(message)
            else:
                who = "nobody who was let in" if worker is None else f"worker {worker}"
                raise MessageError(f"A {type(message).__name__} of {who}.")
        except MessageError as error:
            self._outer.refused.message(str(error))

    def _welcome(self, peer: int, hello: Hello) -> None:
        number, earlier = self._workers.admit(peer, hello)
        if earlier is not None:
            self._outer.drop(earlier)
        send_or_drop(self._outer, peer, Welcome(worker=number))

    def _take(self, message: WorkerSeconds | Join | Leave | Push) -> None:
        """A message of an admitted worker."""
        if isinstance(message, Push):
            self._reports.carried("push", message.gradients, message.changes)
            self._send(self._store.receive(message))
        elif self._head is None:
            raise MessageError(f"A {type(message).__name__}, which is for server 0.")
        elif isinstance(message, WorkerSeconds):
            self._reports.tally(message)
        else:
            self._send(self._head.receive(message))
            self._reports.worker(message.worker, "left" if isinstance(message, Leave) else "joined")

    def _lose_worker(self, peer: int) -> None:
        worker = self._workers.remove(peer)
        if self._head is not None and worker is not None:
            self._send(self._head.lost(worker))
            self._reports.worker(worker, "lost")

    # --- Servers and the head.

    def _from_server(self, event: ReceivedMessage) -> None:
        # both ends belong to this run, and nobody else has their keys
        message = decode(event.header, event.tensors)
        if self._head is None:
            self._send(self._store.receive(message))
        elif isinstance(message, PushStaged | SnapshotKept | ServerReport):
            self._servers[message.server] = event.peer
            self._send(self._head.receive(message))

    def _send(self, sent: Sent) -> None:
        """Messages for this process are handled immediately, in order; those for absent peers are lost."""
        waiting = deque(sent)
        while waiting:
            address, message = waiting.popleft()
            if address == HEAD and self._head is not None:
                waiting.extend(self._head.receive(message))
            elif address == Address("server", self._number):
                waiting.extend(self._store.receive(message))
                self._numbers.next_share = self._storage.next_share  # before the worker hears of it
            elif address.kind == "worker":
                self._send_worker(address.number, message)
            elif self._inner is not None and (peer := self._servers.get(address.number)) is not None:
                send_or_drop(self._inner, peer, message)

    def _send_worker(self, worker: int, message: Any) -> None:
        peer = self._workers.peer(worker)
        if peer is not None:
            if isinstance(message, ParametersPart):
                self._reports.carried("pull", message.values, message.buffers)
            send_or_drop(self._outer, peer, message, self._served.state)

    def _hold(self, content: Content | None) -> Parameters:
        held = self._served.hold(content)
        if self._head is not None:
            self._reports.notes(held.notes())
        return held


def _between_servers(role: Role, *, is_head: bool) -> Endpoint | Connections:
    """This server's end of the connections between servers and the head, with keys of their own."""
    limits = limits_for(FROM_SERVERS | TO_SERVERS)
    if is_head:
        key = read_server_key(role.path / HEAD_KEYS[0])
        return Endpoint(role.head, key, limits, _FOR_SERVERS, listening=role.listening[1])
    return Connections([role.head], read_worker_key(role.path / HEAD_KEYS[1]), limits, _FOR_SERVERS)
