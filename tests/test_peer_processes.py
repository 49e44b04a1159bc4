"""Workers and servers as processes that are killed, stopped and started again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import WAIT_SECONDS, is_lost, kinds_of, meet, poll_until, receive, server, worker
from processes import CONTEXT

from meshloom.comm.messaging.sockets import Joined, ReceivedMessage, SocketLimits
from meshloom.comm.messaging.wire_format import FrameLimits, Header
from meshloom.core.errors import MessageError, PeerLostError

pytestmark = pytest.mark.processes
MEGABYTES = 100
LARGE = FrameLimits(kinds=frozenset({1, 2}), num_tensors=25, tensor_bytes=MEGABYTES * 10**6)


@contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """The process, and an end of a pipe whose other end is the function's first argument."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(WAIT_SECONDS), "The process has said nothing."
    return pipe.recv()


# --- What the processes do


def stay(pipe: Connection, address: str, patience: SocketLimits | None = None) -> None:
    """A worker that polls for ever."""
    with worker(address, patience=patience) as connections:
        while True:
            connections.poll(1.0)


def listen(pipe: Connection, address: str, silent_after: int) -> None:
    """A server that tells what it gets: (worker, sequence). It stops reading after some messages, as a server
    does that is about to die."""
    with server(address) as endpoint:
        pipe.send(endpoint.address)
        count = 0
        while True:
            for event in endpoint.poll(0.1):
                if isinstance(event, ReceivedMessage):
                    count += 1
                    pipe.send((event.header.worker, event.header.sequence))
            if count >= silent_after:
                time.sleep(WAIT_SECONDS)


def push(pipe: Connection, address: str, number: int) -> None:
    """A worker that sends numbered messages as fast as they are taken, until it is told to stop; then tells
    how many."""
    sequence = 0
    tensor = torch.zeros(5000)
    with worker(address) as connections:
        while not pipe.poll():
            connections.poll(0.005)
            for peer in connections.peers:
                try:
                    connections.send(peer, Header(kind=1, worker=number, sequence=sequence), [tensor])
                    sequence += 1
                except (MessageError, PeerLostError):
                    pass
    pipe.send(sequence)


def send_large(pipe: Connection, address: str, slices: int) -> None:
    """A worker that sends a large tensor in slices, and tells by how much its memory has grown at most."""
    with worker(address, limits=LARGE) as connections:
        poll_until(lambda happened: happened[connections], connections)
        tensor = torch.ones(MEGABYTES * 250_000)
        grown = grown_from_here()
        connections.send(1, Header(kind=1), tensor.chunk(slices))
        poll_until(lambda happened: happened[connections], connections)  # the answer: it has arrived
        pipe.send(grown())


def take_large(pipe: Connection) -> None:
    """A server that takes a large tensor, and tells by how much its memory has grown at most."""
    with server(limits=LARGE) as endpoint:
        pipe.send(endpoint.address)
        poll_until(lambda happened: endpoint.peers, endpoint)
        grown = grown_from_here()
        [message] = receive(endpoint, 1)
        assert sum(float(tensor.sum()) for tensor in message.tensors) == MEGABYTES * 250_000
        endpoint.send(message.peer, Header(kind=2))
        pipe.send(grown())


def grown_from_here() -> Callable[[], int]:
    """What tells by how many bytes this process's memory has been larger than now, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    before = status_bytes("VmRSS")
    return lambda: status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")
    ]
    return int(line.split()[1]) * 1024


# --- What must hold


def test_a_killed_worker_is_noticed_and_its_place_can_be_taken():
    with server() as endpoint:
        for peer in (1, 2):
            with running(stay, endpoint.address) as (process, _):
                assert kinds_of(poll_until(lambda happened: happened[endpoint], endpoint)[endpoint]) == [
                    "Joined"
                ]
                assert endpoint.peers == {peer}
                os.kill(process.pid, signal.SIGKILL)
                assert kinds_of(poll_until(lambda happened: happened[endpoint], endpoint)[endpoint]) == [
                    "Lost"
                ]


@pytest.mark.slow
def test_peers_are_lost_within_the_stated_time():
    """A killed one at once; one that is stopped, as one whose machine is unplugged, by heartbeats. Either
    side notices, and they meet again."""
    patience = SocketLimits(lost_after_seconds=3.0)
    # a second for a busy machine
    for number, deadline_seconds in [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 3.0 + 1.0)]:
        with server(patience=patience) as endpoint, worker(endpoint.address, patience=patience) as other:
            meet(endpoint, other)
            with running(stay, endpoint.address, patience) as (process, _):
                poll_until(lambda happened, endpoint=endpoint: len(endpoint.peers) == 2, endpoint)
                began = time.monotonic()
                os.kill(process.pid, number)
                poll_until(lambda happened, endpoint=endpoint: is_lost(happened[endpoint]), endpoint)
                assert time.monotonic() - began < deadline_seconds
                if number == signal.SIGSTOP:
                    os.kill(process.pid, signal.SIGCONT)
                    [event] = poll_until(lambda happened, endpoint=endpoint: happened[endpoint], endpoint)[
                        endpoint
                    ]
                    assert event == Joined(3, "127.0.0.1")
            assert not is_lost(other.poll(0.0))


@pytest.mark.parametrize("lives", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_servers_are_killed_and_no_message_is_heard_twice(lives: int):
    """Three workers send numbered messages to whatever server is there. What all of them together have heard:
    each number at most once, in order."""
    draw = random.Random(3)
    with running(listen, "127.0.0.1:0", 20) as (process, pipe):
        address = heard(pipe)
        process.kill()
    told: list[tuple[int, int]] = []
    with (
        running(push, address, 0) as (_, one),
        running(push, address, 1) as (_, two),
        running(push, address, 2) as (_, three),
    ):
        for _ in range(lives):
            with running(listen, address, draw.randrange(1, 60)) as (process, pipe):
                assert heard(pipe) == address
                before = len(told)
                while len(told) < before + draw.randrange(1, 30):
                    told.append(heard(pipe))
                os.kill(process.pid, signal.SIGKILL)
                try:
                    while pipe.poll(WAIT_SECONDS):
                        told.append(pipe.recv())
                except (EOFError, OSError):  # everything that it said has been read
                    pass
        for pipe in (one, two, three):
            pipe.send("stop")
        sent = [heard(pipe) for pipe in (one, two, three)]
    for number in range(3):
        sequences = [sequence for who, sequence in told if who == number]
        assert sequences == sorted(set(sequences)), sequences
        assert not sequences or sequences[-1] < sent[number]


@pytest.mark.parametrize(("slices", "copies"), [(1, 2.0), (25, 0.2)])
def test_a_large_tensor_is_not_copied_more_often_than_encryption_needs(slices: int, copies: float):
    """ZeroMQ takes twice a frame's bytes to encrypt it, when the frame's turn comes. The receiver has nothing
    but what it receives."""
    with running(take_large) as (_, taker), running(send_large, heard(taker), slices) as (_, sender):
        # 25 MB: what else is loaded and allocated meanwhile
        assert heard(sender) < (copies + 0.25) * MEGABYTES * 10**6
        assert heard(taker) < (1.0 + 0.25) * MEGABYTES * 10**6
