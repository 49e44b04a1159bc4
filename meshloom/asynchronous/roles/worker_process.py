"""A worker's process: it asks for the run's description, is admitted by all servers, and computes shares.

asked --Terms--> checked --Welcome of every server--> joined: the state machine of protocol/worker.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshloom.asynchronous.messaging.codec import (
    FROM_WORKERS,
    TO_WORKERS,
    ServerState,
    decode,
    limits_for,
    send_or_drop,
)
from meshloom.asynchronous.messaging.handshake import (
    Ask,
    Hello,
    RunDescription,
    Welcome,
    WorkerSeconds,
    digest_of,
    facts_of,
)
from meshloom.asynchronous.protocol.messages import Sent
from meshloom.asynchronous.protocol.worker import Worker
from meshloom.asynchronous.roles.reports import SendEvent
from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.keys import WorkerKey
from meshloom.comm.messaging.sockets import Joined, Lost, ReceivedMessage
from meshloom.core.errors import EndpointError, MessageError, PeerLostError
from meshloom.core.job import Job
from meshloom.core.plan import Plan

if TYPE_CHECKING:  # it takes long to import, and servers do without
    from meshloom.asynchronous.state.worker_replica import WorkerReplica

_LOOK_SECONDS = 0.1  # between looks at signals
_LINGER_SECONDS = 10.0  # for the last push of a worker that leaves


def ask(address: str, key: WorkerKey, timeout_seconds: float, stop: Sequence[int]) -> RunDescription | None:
    """The description of the run at HOST:PORT; None if a signal came first.

    Raises `PeerLostError` if nobody answers, `EndpointError` if the key is not that run's.
    """
    deadline = time.monotonic() + timeout_seconds
    with Connections([address], key, limits_for(FROM_WORKERS | TO_WORKERS)) as connections:
        while time.monotonic() < deadline and not stop:
            for event in connections.poll(_LOOK_SECONDS):
                if isinstance(event, Joined):
                    send_or_drop(connections, event.peer, Ask())
                elif isinstance(event, ReceivedMessage):
                    return _description(event)
    if stop:
        return None
    raise PeerLostError(
        f"Nobody at {address} has described its run within {timeout_seconds:g} s. Give the address that meshloom train has printed."
    )


def _description(answer: ReceivedMessage) -> RunDescription:
    with suppress(MessageError):
        if isinstance(found := decode(answer.header, answer.tensors), RunDescription):
            return found
    raise EndpointError(
        "The server describes its run in a way that this version of meshloom does not know. Use the same version everywhere."
    )


class WorkerProcess:
    """replica: on which it computes. address: of server 0. timeout_seconds: how long servers may be away.

    stop: signals that ask it to leave: after the first when its share is pushed, after a second immediately.
    send_event: reports to the launcher.
    """

    def __init__(
        self, job: Job, plan: Plan, description: RunDescription, address: str, key: WorkerKey,
        timeout_seconds: float, stop: Sequence[int], send_event: SendEvent, replica: WorkerReplica,
    ) -> None:  # fmt: skip
        self._send_event = send_event
        self._shares = PushShares(job, plan)
        self._replica = replica
        facts = facts_of(job, plan, self._replica.model, self._shares.num_samples)
        description.check(facts)
        self._digest = digest_of(facts)
        self._holdings = ServerState.of(
            self._replica.whole_model.division, dict(self._replica.model.named_buffers())
        )
        host = address.rpartition(":")[0]
        self._addresses = [address, *(f"{host}:{port}" for port in description.ports[1:])]
        self._key, self._stop, self._timeout_seconds = key, stop, timeout_seconds
        self._peers: dict[int, int] = {}  # server -> its peer, while there is a connection
        self._servers: dict[int, int] = {}
        self._welcome: set[int] = set()  # servers that have admitted this worker
        self._worker: Worker | None = None
        self._number: int | None = None
        self._leaving = False
        self._joined_at = 0.0
        self._computing = self._reading = 0.0

    def run(self) -> None:
        """Until all updates are done or a signal comes. Raises `PeerLostError` when servers stay away."""
        limits = limits_for(FROM_WORKERS | TO_WORKERS, self._holdings)
        connections = self._connections = Connections(self._addresses, self._key, limits)
        well = False
        try:
            self._follow(connections)
            well = True
        finally:
            connections.close(_LINGER_SECONDS if well else 0.0)

    def _follow(self, connections: Connections) -> None:
        apart = time.monotonic()  # since when not all servers are there
        while not (self._worker and self._worker.ended):
            alone = self._worker is None or len(self._welcome) < len(self._addresses)  # nothing can be pushed
            if self._stop and (alone or len(self._stop) > 1):
                return
            self._leave_if_told()
            busy = self._worker is not None and self._worker.task is not None
            for event in connections.poll(0.0 if busy else _LOOK_SECONDS):
                match event:
                    case Joined(peer, address):
                        server = self._addresses.index(address)
                        self._peers[server], self._servers[peer] = peer, server
                        self._greet(server)
                    case Lost(peer):
                        self._forget(peer)
                    case ReceivedMessage():
                        self._hear(event)
            if len(self._welcome) == len(self._addresses):
                apart = time.monotonic()
            elif time.monotonic() > apart + self._timeout_seconds:
                absent = next(server for server in range(len(self._addresses)) if server not in self._welcome)
                away = self._addresses[absent]
                raise PeerLostError(
                    f"The server at {away} has not been there for {self._timeout_seconds:g} s, so this worker ends."
                )
            self._compute()
        if self._number is not None:
            spent = {"computing": self._computing, "reading": self._reading}
            seconds = time.monotonic() - self._joined_at
            self._send(0, WorkerSeconds(worker=self._number, seconds=seconds, **spent))

    def _greet(self, server: int) -> None:
        """Server 0 assigns the number, with which this worker greets the others."""
        if server == 0 or self._number is not None:
            self._send(server, Hello(worker=self._number, digest=self._digest))

    def _forget(self, peer: int) -> None:
        server = self._servers.pop(peer)
        self._peers.pop(server, None)
        self._welcome.discard(server)

    def _hear(self, event: ReceivedMessage) -> None:
        server = self._servers.get(event.peer)
        if server is None:
            return
        try:
            message = decode(event.header, event.tensors, self._holdings[server])
        except MessageError:
            # from a server that has the key, and so of another version; if it is needed it is requested again
            return
        if isinstance(message, Welcome):
            self._welcomed(server, message.worker)
        elif self._worker is not None:
            self._say(self._worker.receive(message))

    def _welcomed(self, server: int, number: int) -> None:
        self._welcome.add(server)
        if self._number is None:
            self._number = number
            self._worker = Worker(number, len(self._addresses))
            self._joined_at = time.monotonic()
            self._send_event({"event": "number", "worker": number})
            self._send_event({"event": "joined"})
            for other in self._peers:
                if other != server:
                    self._greet(other)
        assert self._worker is not None
        if len(self._welcome) == len(self._addresses):
            self._say(self._worker.connected())

    def _compute(self) -> None:
        worker = self._worker
        if worker is None or worker.task is None or worker.ended:
            return
        task, began = worker.task, time.monotonic()
        chunks = self._shares.read(task.share)
        read = time.monotonic()
        self._replica.whole_model.load([part.values for part in task.parts], task.parts[0].buffers or {})
        computed = self._replica.compute(worker.number, chunks)
        self._reading += read - began
        self._computing += time.monotonic() - read
        self._leave_if_told()
        self._say(worker.computed(computed))

    def _leave_if_told(self) -> None:
        if self._stop and not self._leaving and self._worker is not None:
            self._leaving = True
            self._say(self._worker.leave())

    def _say(self, sent: Sent) -> None:
        for address, message in sent:
            self._send(address.number if address.kind == "server" else 0, message)

    def _send(self, server: int, message: object) -> None:
        peer = self._peers.get(server)
        if peer is not None:
            send_or_drop(self._connections, peer, message, self._holdings[server])
