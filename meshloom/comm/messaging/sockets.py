"""ZeroMQ sockets of endpoints and connections: bounded queues, heartbeats, events, frames sent and received.

A context has one I/O thread, so its events of connections arrive in order. Sockets do not reconnect: their
user opens a new one, so that messages queued for one connection do not reach the next.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from meshloom.comm.messaging.keys import ServerKey, WorkerKey
from meshloom.comm.messaging.wire_format import Buffer, FrameLimits, Header, read_frames
from meshloom.core.errors import EndpointError

_ENVELOPE_BYTES = 256  # what CURVE adds to a frame, and more
_HANDSHAKE_BYTES = 4096
# -1 (never) would discard received messages as soon as a connection ends
_NEVER_SECONDS = 1_000_000
HANDSHAKE_SECONDS = 30.0  # a server may be busy for a while before it checks a new peer's key
MONITORED_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True)
class Joined:
    """A peer was admitted. Every connection is a new peer with a new number, even of the same process.
    address: HOST:PORT or HOST."""

    peer: int
    address: str


@dataclass(frozen=True)
class Lost:
    """A peer has disconnected, and no more messages of it follow. Messages on their way to it may be lost;
    none arrives twice or later."""

    peer: int
    address: str


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """From an admitted peer. The tensors use the memory of the received frames, and may be written to."""

    peer: int
    header: Header
    tensors: list[Tensor]


Event: TypeAlias = Joined | Lost | ReceivedMessage


@dataclass(frozen=True, kw_only=True)
class SocketLimits:
    """How long a peer may be silent, and how many messages may be queued for it.

    lost_after_seconds: a peer whose machine or process does not answer is lost within this time (one that
        ended, immediately). A tensor must be sent in less than half of it, since heartbeats travel between
        frames. queue_messages: for a peer on this side, and as many on the other.
    """

    lost_after_seconds: float = 10.0
    queue_messages: int = 8

    def __post_init__(self) -> None:
        if self.lost_after_seconds <= 0 or self.queue_messages < 1:
            raise EndpointError(
                f"lost_after_seconds={self.lost_after_seconds} and queue_messages={self.queue_messages}: the one must be positive, the other at least 1."
            )


def open_socket(
    context: zmq.Context[Any], kind: int, limits: FrameLimits, patience: SocketLimits
) -> zmq.Socket[Any]:
    """A socket that limits frames and queues, and detects dead peers."""
    opened: zmq.Socket[Any] = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDHWM, patience.queue_messages)
    opened.setsockopt(zmq.RCVHWM, patience.queue_messages)
    opened.setsockopt(zmq.MAXMSGSIZE, max(limits.frame_bytes, _HANDSHAKE_BYTES) + _ENVELOPE_BYTES)
    opened.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(patience.lost_after_seconds * 1000 / 3)))
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(patience.lost_after_seconds * 1000 / 2)))
    opened.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_SECONDS * 1000))
    opened.setsockopt(zmq.RECONNECT_IVL, _NEVER_SECONDS * 1000)
    return opened


def set_keys(socket: zmq.Socket[Any], key: ServerKey | WorkerKey) -> None:
    """Let the socket encrypt with this pair of keys."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())


class ConnectionMonitor:
    """The events of a socket's connections, in order: (event, descriptor or detail)."""

    def __init__(self, context: zmq.Context[Any], watched: zmq.Socket[Any]) -> None:
        # a new name each time: the I/O thread releases that of a closed monitor a little later
        name = f"inproc://watch-{secrets.token_hex(16)}"
        watched.monitor(name, MONITORED_EVENTS)
        self.socket: zmq.Socket[Any] = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        # a full queue would stop the I/O thread
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(name)
        self._watched = watched

    def events(self) -> Iterator[tuple[int, int]]:
        """Since the last call."""
        while (frames := receive(self.socket, 2)) is not None:
            event = parse_monitor_message([frame.bytes for frame in frames])
            yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close()


def receive(source: zmq.Socket[Any], most: int) -> list[zmq.Frame] | None:
    """The first `most` frames of the next message, whose others are dropped; None if there is none."""
    try:
        frame = source.recv(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = source.recv(zmq.DONTWAIT, copy=False)
        if len(frames) < most:
            frames.append(frame)
    return frames


def received(peer: int, frames: Sequence[zmq.Frame], limits: FrameLimits) -> ReceivedMessage:
    """The message in the frames. Raises `MessageError` if they are malformed."""
    return ReceivedMessage(peer, *read_frames([frame.buffer for frame in frames], limits))


def send(target: zmq.Socket[Any], frames: Sequence[Buffer]) -> None:
    """Send frames without copying them, or nothing if it raises `zmq.Again` or another `zmq.ZMQError`."""
    target.send_multipart(frames, zmq.DONTWAIT, copy=False)


def resolve_address(address: str) -> tuple[str, int, bool]:
    """The numeric address of HOST:PORT, its port, and whether it is IPv6. Raises `EndpointError`.

    >>> resolve_address("127.0.0.1:5000")
    ('127.0.0.1', 5000, False)
    >>> resolve_address("[::1]:5000")
    ('[::1]', 5000, True)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise EndpointError(f"{address!r} is not an address. Write HOST:PORT, for example 192.168.0.5:5000.")
    try:
        name = host.removeprefix("[").removesuffix("]")
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as reason:
        raise EndpointError(f"The host {host} of {address} is not known: {reason.strerror}.") from None
    numeric = str(found[0][4][0])
    six = ipaddress.ip_address(numeric.split("%")[0]).version == 6
    return (f"[{numeric}]" if six else numeric), int(port), six
