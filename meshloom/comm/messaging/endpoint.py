"""A server's end: it listens at one address; workers that have the job's key connect and disconnect.

    with Endpoint("192.168.0.5:0", key, limits) as endpoint:
        for event in endpoint.poll(timeout_seconds=1.0):
            match event:
                case Joined(peer): ...
                case ReceivedMessage(peer, header, tensors):
                    endpoint.send(peer, Header(kind=ANSWER, answers=header.sequence), [parameters])
                case Lost(peer): ...

An endpoint belongs to one thread. ZeroMQ's own thread keeps connections alive and encrypts, whatever that
thread computes; the next `poll` admits new workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
from torch import Tensor
from zmq.utils import z85

from meshloom.comm.messaging.keys import ServerKey
from meshloom.comm.messaging.sockets import (
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
from meshloom.comm.messaging.wire_format import FrameLimits, Header, write_frames
from meshloom.core.errors import EndpointError, MessageError, PeerLostError

_MOST_PER_POLL = 16  # messages of one poll
# how long a disconnected peer's messages may take to be read while others keep arriving
_LAST_WORDS_SECONDS = 1.0
_DOMAIN = "meshloom"


@dataclass
class RefusedCounts:
    """Counts of what was refused so far.

    connections: that ended before their peer was admitted: no key, another job's key, or another protocol.
    keys: how many of them showed a key. messages: of admitted peers. last: why the last message was refused.
    """

    connections: int = 0
    keys: int = 0
    messages: int = 0
    last: str = ""

    def message(self, why: str) -> None:
        """Count a refused message; the endpoint's user counts those here that are senseless to it."""
        self.messages += 1
        self.last = why


@dataclass(frozen=True, kw_only=True)
class _Peer:
    identity: bytes
    descriptor: int
    address: str


class _KeyCheck:
    """Answers ZeroMQ's authentication requests (its RFC 27): only the workers' key is accepted."""

    def __init__(self, context: zmq.Context[Any], workers_public: str) -> None:
        self._workers_key = z85.decode(workers_public.encode())
        self.socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> int:
        """Answer all requests; how many had another key."""
        refused = 0
        while (frames := receive(self.socket, 8)) is not None:
            request = [frame.bytes for frame in frames]
            known = (
                len(request) == 7
                and request[5] == b"CURVE"
                and request[2] == _DOMAIN.encode()
                and request[6] == self._workers_key
            )
            refused += not known
            answer = [b"200", b"", b"worker", b""] if known else [b"400", b"", b"", b""]
            self.socket.send_multipart([b"1.0", request[1] if len(request) > 1 else b"", *answer])
        return refused


class Endpoint:
    """Listens at the given address (HOST:PORT; port 0: any) until `close`. Raises `EndpointError`.

    listening: descriptor of a socket that already listens there, so that a restarted server keeps it.
    """

    def __init__(
        self,
        address: str,
        key: ServerKey,
        limits: FrameLimits,
        patience: SocketLimits | None = None,
        listening: int | None = None,
    ) -> None:
        host, port, six = resolve_address(address)
        self.limits = limits
        self.refused = RefusedCounts()
        self._peers: dict[int, _Peer] = {}
        self._numbers: dict[bytes, int] = {}
        self._peer_of_descriptor: dict[int, int] = {}  # descriptor of a connection -> peer
        self._open: set[int] = set()  # descriptors of connections
        # peers whose connection ended -> until when their messages are still read
        self._ending: dict[int, float] = {}
        self._events: deque[Event] = deque()
        self._num_joined = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._patience = patience or SocketLimits()
        # before anybody can connect: without it every key would be accepted
        self._keys = _KeyCheck(self._context, key.workers_public)
        self._router = open_socket(self._context, zmq.ROUTER, limits, self._patience)
        self._router.setsockopt(zmq.IPV6, six)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        set_keys(self._router, key)
        self._router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if listening is not None:
            self._router.setsockopt(zmq.USE_FD, listening)
        self._monitor = ConnectionMonitor(self._context, self._router)
        # for a poller that also waits for others
        self.sockets = [self._keys.socket, self._router, self._monitor.socket]
        self._poller = zmq.Poller()
        for each in self.sockets:
            self._poller.register(each, zmq.POLLIN)
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close(0.0)
            raise EndpointError(
                f"Cannot listen at {address}: {error.strerror}. Give an address of this machine and a free port, or port 0."
            ) from None
        self.address = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT)).removeprefix("tcp://")

    @property
    def peers(self) -> frozenset[int]:
        """The admitted peers that are not lost."""
        return frozenset(self._peers)

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Send without waiting; tensors are not copied, and must not change.

        Raises `PeerLostError` if the peer is gone, `MessageError` if its queue is full: send later or `drop`.
        """
        if peer not in self._peers:
            raise PeerLostError(f"Peer {peer} is gone.")
        known = self._peers[peer]
        frames = write_frames(header, tensors, self.limits)
        try:
            send(self._router, [known.identity, *frames])
        except zmq.Again:
            waiting = f"{self._patience.queue_messages} messages"
            raise MessageError(
                f"Peer {peer} at {known.address} has not taken {waiting} that wait for it. Send later, or drop it."
            ) from None
        except zmq.ZMQError:
            raise PeerLostError(f"Peer {peer} at {known.address} is gone.") from None

    def drop(self, peer: int) -> None:
        """Treat a peer as lost: nothing more is read from it, and a `Lost` follows. Its connection stays open
        until the peer or the endpoint closes it."""
        if peer in self._peers:
            self._lose(peer)

    def poll(self, timeout_seconds: float) -> list[Event]:
        """The events since the last call, in order; waits for the first at most this long. Admits peers that
        show the job's key, and reads some 16 messages at most."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.refused.keys += self._keys.answer()
            self._read_monitor()
            self._read()
            if self._events:
                events, self._events = list(self._events), deque()
                return events
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return []
            self._poller.poll(max(1, int(remaining * 1000)))

    def close(self, linger_seconds: float = 1.0) -> None:
        """Stop listening, and end once peers have received everything, or after this long."""
        if self._context.closed:
            return
        self._monitor.close()
        self._keys.socket.close()
        self._router.close(linger=round(linger_seconds * 1000))
        self._context.destroy()
        self._peers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(1.0 if kind is None else 0.0)

    def _read_monitor(self) -> None:
        for event, descriptor in self._monitor.events():
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                peer = self._peer_of_descriptor.pop(descriptor, None)
                if peer is None:
                    self.refused.connections += 1
                else:
                    self._ending[peer] = time.monotonic() + _LAST_WORDS_SECONDS

    def _read(self) -> None:
        """Read the messages that have arrived; then report the loss of disconnected peers."""
        for _ in range(_MOST_PER_POLL):
            # one more than allowed, so that an excess is noticed
            frames = receive(self._router, 2 + self.limits.num_tensors + 1)
            if frames is None:
                for peer in list(self._ending):
                    self._lose(peer)
                break
            self._take(frames[0].bytes, frames[1:])
        for peer in [peer for peer, until in self._ending.items() if until < time.monotonic()]:
            self._lose(peer)

    def _take(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        peer = self._numbers.get(identity)
        if peer is None:
            if len(frames) == 1 and not len(frames[0]):  # ZeroMQ's probe, which a connection sends first
                self._welcome(identity, frames[0])
            else:
                self.refused.message("A message of nobody who is there.")
            return
        try:
            self._events.append(received(peer, frames, self.limits))
        except MessageError as error:
            self.refused.message(str(error))

    def _welcome(self, identity: bytes, frame: zmq.Frame) -> None:
        descriptor = int(frame.get(zmq.SRCFD))
        self._read_monitor()  # earlier events of this descriptor are known now
        if descriptor not in self._open:
            return  # it has already disconnected
        # its former peer disconnected before, and was admitted late
        if descriptor in self._peer_of_descriptor:
            self._lose(self._peer_of_descriptor[descriptor])
        self._num_joined += 1
        number, address = self._num_joined, str(frame.get("Peer-Address"))
        self._peers[number] = _Peer(identity=identity, descriptor=descriptor, address=address)
        self._numbers[identity] = self._peer_of_descriptor[descriptor] = number
        self._events.append(Joined(number, address))

    def _lose(self, number: int) -> None:
        peer = self._peers.pop(number)
        del self._numbers[peer.identity]
        self._ending.pop(number, None)
        if self._peer_of_descriptor.get(peer.descriptor) == number:
            del self._peer_of_descriptor[peer.descriptor]
        self._events.append(Lost(number, peer.address))
