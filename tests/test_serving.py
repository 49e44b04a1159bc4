"""Servers and a worker over real sockets, as threads of one process: one worker is one device, whatever is
sent to the servers besides."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_world import World
from peers import WAIT_SECONDS

from meshloom.asynchronous.messaging.codec import decode, encode, send_or_drop
from meshloom.asynchronous.messaging.handshake import Ask, Hello, RunDescription, Welcome
from meshloom.asynchronous.protocol.messages import Join
from meshloom.asynchronous.roles.worker_process import ask
from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.sockets import Joined, ReceivedMessage
from meshloom.comm.messaging.wire_format import FrameLimits, Header
from meshloom.core.errors import JobError, MessageError
from meshloom.core.job import Job
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.jobs import make_job

pytestmark = pytest.mark.long


def one_device(job: Job, plan: str = "dp=1") -> dict[str, torch.Tensor]:
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        trainer.fit()
        return dict(trainer.replicas[0].model.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("model", "optimizer", "servers"),
    [("cnn", "sgd", 1), ("gpt", "adamw", 3), ("unused_twice", "muon", 1), ("branch", "adafactor", 2)],
)
def test_one_worker_is_one_device_bit_for_bit(
    model: str, optimizer: str, servers: int, tmp_path: Path
) -> None:
    """float32, with clipping, schedulers, dropout, batch statistics, short batches, unused parameters."""
    job = make_job(model, optimizer, steps=7)
    world = World(job, f"dp=1,microbatches=2,exchange=async,servers={servers}", tmp_path)
    with world.serving():
        world.work()
        assert world.finished.wait(WAIT_SECONDS), world.errors
    assert world.updates() == list(range(1, 8))
    assert same(world.state(), one_device(job, "dp=1,microbatches=2"))
    assert [world.count("refused", server) for server in range(servers)] == [0] * servers


def test_several_workers_share_the_updates(tmp_path: Path) -> None:
    world = World(make_job("mlp", "sgd", steps=20), "dp=3,exchange=async,servers=2,staleness=2", tmp_path)
    with world.serving():
        threads = [threading.Thread(target=world.work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert world.finished.wait(WAIT_SECONDS), world.errors
    updates = [event for event in world.told[0] if event["event"] == "update"]
    assert world.updates() == list(range(1, 21))
    assert sorted(event["share"] for event in updates) == list(range(20))
    assert max(event["gap"] for event in updates) <= 2
    assert {event["worker"] for event in world.told[0] if event["event"] == "tally"} == {0, 1, 2}


def test_a_worker_that_is_told_to_go_pushes_its_share_first(tmp_path: Path) -> None:
    stop: list[int] = []
    losses: list[int] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        losses.append(1)
        if len(losses) == 4:
            stop.append(15)
        return model(batch["x"]).square().mean()

    job = make_job("mlp", "sgd", loss=loss, steps=9)
    world = World(job, "dp=1,exchange=async", tmp_path)
    with world.serving():
        world.work(stop=stop)
        # the server may tell that the worker has left before the update of its last share
        while world.updates() != [1, 2, 3, 4] or not any(
            event.get("what") == "left" for event in world.told[0]
        ):
            assert not world.errors and len(world.updates()) <= 4
        world.work()  # another one goes on
        assert world.finished.wait(WAIT_SECONDS), world.errors
    assert world.updates() == list(range(1, 10))
    assert [event["share"] for event in world.told[0] if event["event"] == "update"] == list(range(9))
    assert {event["worker"] for event in world.told[0] if event["event"] == "update"} == {0, 1}


def test_another_job_is_refused_by_both_sides(tmp_path: Path) -> None:
    job = make_job("mlp", "sgd", steps=5)
    world = World(job, "dp=1,exchange=async", tmp_path)
    with world.serving():
        with pytest.raises(JobError, match="batch_size is 12 there and 6 here"):
            world.work(replace(job, batch_size=6))
        description = ask(world.addresses[0], world.worker_key, WAIT_SECONDS, [])
        assert description is not None
        # what a worker that does not compare would say
        for claimed, message in ((None, Hello(worker=None, digest="0" * 64)), (7, Join(worker=7))):
            refused = _say(world, *encode(message))
            assert refused, claimed
        world.work()
        assert world.finished.wait(WAIT_SECONDS), world.errors
    assert world.count("refused") == 2
    assert [event["worker"] for event in world.told[0] if event["event"] == "worker"][:1] == [0]


def _say(world: World, header: Header, tensors: list[torch.Tensor]) -> bool:
    """Send it as a member of the run, and wait until it was looked at: the next message of this connection is
    answered."""
    limits = FrameLimits(kinds=frozenset(range(100)), num_tensors=70, tensor_bytes=4 << 20)
    with Connections([world.addresses[0]], world.worker_key, limits) as connections:
        [joined] = connections.poll(WAIT_SECONDS)
        assert isinstance(joined, Joined)
        connections.send(joined.peer, header, tensors)
        connections.send(joined.peer, *encode(Ask()))
        [answer] = connections.poll(WAIT_SECONDS)
        return isinstance(answer, ReceivedMessage) and isinstance(
            decode(answer.header, answer.tensors), RunDescription
        )


def _disturbed(world: World, texts: int, messages: int) -> None:
    """Random bytes at the ports, and messages of a member that make no sense, from several threads while
    training goes on."""
    # its own: the worker's thread builds its model from the common one
    chooser, generator = random.Random(1), torch.Generator().manual_seed(1)
    for number in range(texts):
        say(
            world.addresses[number % len(world.addresses)],
            (b"\xff" + bytes(8) + b"\x7f" if number % 2 else b"")
            + chooser.randbytes(chooser.randrange(1, 200)),
        )
    limits = FrameLimits(kinds=frozenset(range(1 << 16)), num_tensors=70, tensor_bytes=4 << 20)
    with Connections([world.addresses[0]], world.worker_key, limits) as connections:
        [joined] = connections.poll(WAIT_SECONDS)
        assert isinstance(joined, Joined)
        for _ in range(messages):
            kind = chooser.choice([*range(40), 9999])
            tensors = [
                torch.randint(-3, 99, (chooser.randrange(6),), generator=generator).to(
                    chooser.choice([torch.int64, torch.float64, torch.uint8])
                )
                for _ in range(chooser.randrange(5))
            ]
            try:
                connections.send(joined.peer, Header(kind=kind, worker=chooser.randrange(3)), tensors)
            except Exception:
                connections.poll(0.001)


def say(address: str, text: bytes) -> None:
    import socket

    with socket.create_connection(
        ("127.0.0.1", int(address.rpartition(":")[2])), timeout=WAIT_SECONDS
    ) as client:
        client.sendall(text)


@pytest.mark.parametrize(
    ("texts", "messages"), [(300, 300), pytest.param(10_000, 10_000, marks=pytest.mark.slow)]
)
def test_whatever_is_sent_training_is_the_same(texts: int, messages: int, tmp_path: Path) -> None:
    job = make_job("mlp", "adamw", steps=40)
    disturbing = threading.Event()

    def loss(model: Any, batch: Any) -> Any:
        if not disturbing.is_set():
            disturbing.wait(0.01)  # training lasts as long as what disturbs it
        return job.loss(model, batch)

    world = World(replace(job, loss=loss), "dp=1,exchange=async,servers=2", tmp_path)
    with world.serving():
        worker = threading.Thread(target=world.work)
        worker.start()
        _disturbed(world, texts, messages)
        disturbing.set()
        worker.join()
        assert world.finished.wait(WAIT_SECONDS), world.errors
    assert not world.errors
    assert same(world.state(), one_device(job))
    assert sum(world.count("refused", server) for server in range(2)) >= texts


class _Full:
    """An end whose peer takes the first `takes` messages, and no more."""

    def __init__(self, takes: int) -> None:
        self.takes, self.sent, self.dropped = takes, 0, list[int]()

    def send(self, peer: int, header: Header, tensors: Any) -> None:
        if self.sent == self.takes:
            raise MessageError("It has not taken what was sent before.")
        self.sent += 1

    def drop(self, peer: int) -> None:
        self.dropped.append(peer)


def test_answers_that_nobody_reads_are_not_kept() -> None:
    """A server's memory grew by 40 MiB for 33,000 questions of a member that read no answer. Now it is
    dropped when its queue is full."""
    end: Any = _Full(takes=20)
    for _ in range(20):
        send_or_drop(end, 7, Welcome(worker=3))
    assert not end.dropped
    send_or_drop(end, 7, Welcome(worker=3))
    assert end.dropped == [7]


def test_a_push_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    job = make_job("mlp", "sgd", steps=3)
    world = World(job, "dp=1,exchange=async", tmp_path)
    with world.serving():
        header = Header(kind=6)
        _say(
            world,
            header,
            [torch.tensor([0, 1]), torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.uint8)],
        )
        world.work()
        assert world.finished.wait(WAIT_SECONDS), world.errors
    assert world.count("refused") == 1
    assert same(world.state(), one_device(job))
