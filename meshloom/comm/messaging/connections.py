"""A worker's end: connections to the servers of its job, each reopened whenever it ends.

    with Connections(["192.168.0.5:5000"], key, limits) as connections:
        for event in connections.poll(timeout_seconds=1.0):
            match event:
                case Joined(peer): connections.send(peer, Header(kind=HELLO))
                case Message(peer, header, tensors): ...
                case Lost(peer): ...  # a Joined with another number follows when the server is back

Connections belong to one thread. ZeroMQ's own thread keeps them alive and encrypts, whatever that thread
computes; `poll` reopens a lost one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

import zmq
from torch import Tensor

from meshloom.comm.messaging.keys import WorkerKey
from meshloom.comm.messaging.server_connection import ServerConnection
from meshloom.comm.messaging.sockets import Event, SocketLimits, resolve_address
from meshloom.comm.messaging.wire_format import FrameLimits, Header, write_frames
from meshloom.core.errors import PeerLostError


class Connections:
    """To the servers at these addresses (HOST:PORT), which need not be running yet. Raises `EndpointError`
    for malformed or unknown addresses."""

    def __init__(
        self,
        addresses: Sequence[str],
        key: WorkerKey,
        limits: FrameLimits,
        patience: SocketLimits | None = None,
    ) -> None:
        for address in addresses:
            resolve_address(address)
        self.limits = limits
        self._events: deque[Event] = deque()
        self._context: zmq.Context[Any] = zmq.Context()
        numbers = count(1)
        self._connections = [
            ServerConnection(
                self._context, address, key, limits, patience or SocketLimits(), self._events, numbers
            )
            for address in addresses
        ]

    @property
    def peers(self) -> dict[int, str]:
        """The connected servers: number of the connection -> address, in the order of addresses."""
        return {each.peer: each.address for each in self._connections if each.peer is not None}

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """The current sockets, for a poller that also waits for others."""
        return [each for connection in self._connections for each in connection.sockets]

    @property
    def num_refused(self) -> int:
        """Malformed messages so far, from servers that have the job's key."""
        return sum(each.num_refused for each in self._connections)

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Send without waiting; tensors are not copied, and must not change.

        Raises `PeerLostError` if that connection has ended, `MessageError` if the server's queue is full.
        """
        self._connection_of(peer).send(write_frames(header, tensors, self.limits))

    def drop(self, peer: int) -> None:
        """End a connection, as of a server that does not answer: a `Lost` follows, and it is reopened."""
        self._connection_of(peer).end()

    def poll(self, timeout_seconds: float) -> list[Event]:
        """The events since the last call, in order; waits for the first at most this long. Raises
        `EndpointError` if a server refuses the key."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            for each in self._connections:
                each.look()
            if self._events:
                events = list(self._events)
                self._events.clear()
                return events
            now = time.monotonic()
            if now >= deadline:
                return []
            poller = zmq.Poller()
            for each in self.sockets:
                poller.register(each, zmq.POLLIN)
            until = min(deadline, *(each.next_look for each in self._connections))
            poller.poll(max(1, int((until - now) * 1000)))

    def close(self, linger_seconds: float = 1.0) -> None:
        """End all connections once servers have received everything, or after this long."""
        for each in self._connections:
            each.close(linger_seconds)
        self._context.destroy()  # `term` would wait for open sockets for ever

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(1.0 if kind is None else 0.0)

    def _connection_of(self, peer: int) -> ServerConnection:
        for each in self._connections:
            if each.peer == peer:
                return each
        raise PeerLostError(f"Connection {peer} has ended.")
