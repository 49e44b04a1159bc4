"""The connection of a worker to one server, reopened whenever it ends.

Every connection has its own socket and identity, so that no message of one connection reaches the next.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from meshloom.comm.messaging.keys import WorkerKey
from meshloom.comm.messaging.sockets import (
    HANDSHAKE_SECONDS,
    ConnectionMonitor,
    Event,
    Joined,
    Lost,
    SocketLimits,
    open_socket,
    receive,
    received,
    resolve_address,
    send,
    set_keys,
)
from meshloom.comm.messaging.wire_format import Buffer, FrameLimits
from meshloom.core.errors import EndpointError, MessageError, PeerLostError

_RETRY_SECONDS = 0.2
_MOST_PER_POLL = 16  # messages
_MOST_BROKEN_HANDSHAKES = 5  # in a row; a single one may be of a server that was killed meanwhile
_HANDSHAKE_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


class ServerConnection:
    """To the server at `address`. Appends to `events`; each connection takes its number from `numbers`."""

    def __init__(
        self, context: zmq.Context[Any], address: str, key: WorkerKey, limits: FrameLimits,
        patience: SocketLimits, events: deque[Event], numbers: Iterator[int],
    ) -> None:  # fmt: skip
        self.address = address
        self.peer: int | None = None  # the connection's number, once the server has accepted the key
        self.num_refused = 0
        self._context, self._key, self._limits, self._patience = context, key, limits, patience
        self._events, self._numbers = events, numbers
        self._broken_handshakes = 0
        self._ended = False
        self._socket: zmq.Socket[Any] | None = None
        self._monitor: ConnectionMonitor | None = None
        self._opened = 0.0
        self._next_try = 0.0  # when to connect, or to give up connecting

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """For a poller; none while there is no connection."""
        return [self._socket, self._monitor.socket] if self._socket and self._monitor else []

    @property
    def next_look(self) -> float:
        """When `look` is due, even if nothing arrives."""
        return self._next_try if self.peer is None else float("inf")

    def look(self) -> None:
        """Connect if it is time; read events and messages. Raises `EndpointError` if the key is refused."""
        if self.peer is None and time.monotonic() >= self._next_try:
            self._close(0.0)
            self._open()
        if not self._socket:
            return
        self._read_events()
        for _ in range(_MOST_PER_POLL):
            # one more than allowed, so that an excess is noticed
            if (frames := receive(self._socket, 1 + self._limits.num_tensors + 1)) is None:
                if self._ended:
                    self.end()
                return
            self._read_events()  # messages follow the handshake, whose event may be unread
            self._take(frames)

    def send(self, frames: Sequence[Buffer]) -> None:
        """To the connected server. Raises `PeerLostError`, or `MessageError` if its queue is full."""
        if self._socket is None or self._ended:
            raise PeerLostError(f"The connection to {self.address} has ended.")
        try:
            send(self._socket, frames)
        except zmq.Again:
            self._read_events()
            if self._ended:
                raise PeerLostError(f"The connection to {self.address} has ended.") from None
            waiting = f"{self._patience.queue_messages} messages"
            raise MessageError(
                f"The server at {self.address} has not taken {waiting} that wait for it. Send later."
            ) from None

    def end(self) -> None:
        """End this connection; the next is opened a little later."""
        self._close(0.0)
        self._next_try = time.monotonic() + _RETRY_SECONDS
        if self.peer is not None:
            self._events.append(Lost(self.peer, self.address))
            self.peer = None

    def close(self, linger_seconds: float) -> None:
        """For good, once the server has received everything, or after this long."""
        self._close(linger_seconds if self.peer is not None else 0.0)
        self.peer = None

    def _open(self) -> None:
        try:
            # resolved every time: a restarted server may have another address under the same name
            host, port, six = resolve_address(self.address)
        except EndpointError:  # it was known when the worker started
            self._next_try = time.monotonic() + _RETRY_SECONDS
            return
        # assigned first, so that it is closed whatever fails
        socket = self._socket = open_socket(self._context, zmq.DEALER, self._limits, self._patience)
        socket.setsockopt(zmq.IPV6, six)
        socket.setsockopt(zmq.ROUTING_ID, b"W" + os.urandom(15))
        # tells the server of every connection before its first message
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, round(self._patience.lost_after_seconds * 1000)))
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.servers_public.encode())
        set_keys(socket, self._key)
        self._monitor = ConnectionMonitor(self._context, socket)
        self._ended = False
        self._opened = time.monotonic()
        self._next_try = self._opened + self._patience.lost_after_seconds + HANDSHAKE_SECONDS
        socket.connect(f"tcp://{host}:{port}")

    def _close(self, linger_seconds: float) -> None:
        if self._monitor:
            self._monitor.close()
        if self._socket:
            self._socket.close(linger=round(linger_seconds * 1000))
        self._socket = self._monitor = None

    def _read_events(self) -> None:
        for event, detail in self._monitor.events() if self._monitor else ():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._broken_handshakes = 0
                self.peer = next(self._numbers)
                self._events.append(Joined(self.peer, self.address))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise EndpointError(
                    f"The server at {self.address} refuses this worker's key ({detail}). Use the worker key that was made for its job."
                )
            elif event in _HANDSHAKE_FAILED and time.monotonic() - self._opened < HANDSHAKE_SECONDS / 2:
                # else the server is busy
                self._broken_handshakes += 1
                if self._broken_handshakes == _MOST_BROKEN_HANDSHAKES:
                    raise EndpointError(
                        f"What listens at {self.address} has broken off {_MOST_BROKEN_HANDSHAKES} handshakes: it is no server of this worker key's job. "
                        "Use the address and the worker key of the same job."
                    )
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._ended = True

    def _take(self, frames: list[zmq.Frame]) -> None:
        if self.peer is None:
            return
        try:
            self._events.append(received(self.peer, frames, self._limits))
        except MessageError:
            self.num_refused += 1
