"""Workers and servers that talk to each other, driven by one thread or as processes; and clients that are
neither."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import zmq
from zmq.utils import z85

from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.endpoint import Endpoint
from meshloom.comm.messaging.keys import ServerKey, WorkerKey
from meshloom.comm.messaging.sockets import Event, Joined, Lost, ReceivedMessage, SocketLimits
from meshloom.comm.messaging.wire_format import FrameLimits

LIMITS = FrameLimits(kinds=frozenset(range(10)), num_tensors=32, tensor_bytes=1 << 20)
WAIT_SECONDS = 30.0  # for what comes in milliseconds where the machine is not busy

_SECRETS = [z85.encode(bytes([number] * 32)) for number in (1, 2)]  # the same in all processes of a test
_PUBLIC = [zmq.curve_public(secret).decode() for secret in _SECRETS]
SERVER = ServerKey(public=_PUBLIC[0], secret=_SECRETS[0].decode(), workers_public=_PUBLIC[1])
WORKER = WorkerKey(public=_PUBLIC[1], secret=_SECRETS[1].decode(), servers_public=_PUBLIC[0])

Peer = Endpoint | Connections


def server(
    address: str = "127.0.0.1:0", limits: FrameLimits = LIMITS, patience: SocketLimits | None = None
) -> Endpoint:
    return Endpoint(address, SERVER, limits, patience)


def worker(
    *addresses: str,
    limits: FrameLimits = LIMITS,
    patience: SocketLimits | None = None,
    key: WorkerKey = WORKER,
) -> Connections:
    return Connections(addresses, key, limits, patience)


def poll_until(done: Callable[[dict[Peer, list[Event]]], object], *peers: Peer) -> dict[Peer, list[Event]]:
    """All peers in turn, until `done` is true of what has happened to each."""
    happened: dict[Peer, list[Event]] = {peer: [] for peer in peers}
    deadline = time.monotonic() + WAIT_SECONDS
    while not done(happened):
        assert time.monotonic() < deadline, f"It has not happened: {happened}"
        for peer in peers:
            happened[peer] += peer.poll(0.01)
    return happened


def meet(endpoint: Endpoint, *workers: Connections) -> list[int]:
    """The endpoint's numbers of the workers, which join one after the other."""
    numbers: list[int] = []
    for each in workers:
        happened = poll_until(
            lambda happened, each=each: happened[endpoint] and happened[each], endpoint, each
        )
        [joined] = happened[endpoint]
        assert isinstance(joined, Joined)
        numbers.append(joined.peer)
    return numbers


def receive(peer: Peer, count: int) -> list[ReceivedMessage]:
    """The next messages, and nothing else comes."""
    events = poll_until(lambda happened: len(happened[peer]) >= count, peer)[peer]
    assert all(isinstance(event, ReceivedMessage) for event in events) and len(events) == count, events
    return [event for event in events if isinstance(event, ReceivedMessage)]


def kinds_of(events: Sequence[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def is_lost(events: Sequence[Event]) -> bool:
    return any(isinstance(event, Lost) for event in events)


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.address.rpartition(":")[2])


@contextmanager
def dealer(endpoint: Endpoint, *, keys: bool = True, greets: bool = True) -> Iterator[zmq.Socket[Any]]:
    """A client written with ZeroMQ alone, that may send anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.PROBE_ROUTER, greets)
        if keys:
            made.setsockopt(zmq.CURVE_SERVERKEY, SERVER.public.encode())
            made.setsockopt(zmq.CURVE_PUBLICKEY, WORKER.public.encode())
            made.setsockopt(zmq.CURVE_SECRETKEY, WORKER.secret.encode())
        made.connect(f"tcp://{endpoint.address}")
        yield made


def say(endpoint: Endpoint, text: bytes) -> None:
    """Connect, send the bytes, and hang up."""
    with socket.create_connection(("127.0.0.1", port_of(endpoint)), timeout=WAIT_SECONDS) as client:
        client.sendall(text)


def listening_ports() -> set[tuple[str, int]]:
    """Where this process accepts connections of the network."""
    import psutil

    return {
        tuple(each.laddr)
        for each in psutil.Process(os.getpid()).net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    }


@contextmanager
def slow_link(port: int, bytes_per_second: float) -> Iterator[str]:
    """An address whose connections go on to the port of this machine, no faster than this in either
    direction."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends: list[socket.socket] = []
        threads: list[threading.Thread] = []
        listener.settimeout(0.05)
        over = threading.Event()

        def forward(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 14):
                    target.sendall(data)
                    time.sleep(len(data) / bytes_per_second)
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    near, _ = listener.accept()
                    near.settimeout(None)
                    far = socket.create_connection(("127.0.0.1", port))
                    ends.extend([near, far])
                    for pair in ((near, far), (far, near)):
                        threads.append(threading.Thread(target=forward, args=pair))
                        threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            accepting.join()
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in ends:
                end.close()
