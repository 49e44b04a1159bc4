"""Servers and workers of an asynchronous run as threads of this process, over real sockets; what they tell is
kept."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peers import WAIT_SECONDS
from torch import Tensor

from meshloom.asynchronous.messaging.handshake import RunDescription
from meshloom.asynchronous.roles.server_process import ServerProcess
from meshloom.asynchronous.roles.worker_process import WorkerProcess, ask
from meshloom.asynchronous.state.checkpoints import read_content
from meshloom.asynchronous.state.parameters import Content, Parameters
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.snapshots import read_snapshot, snapshot_name
from meshloom.asynchronous.state.worker_model import WorkerModel
from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.comm.messaging.keys import make_keys, write_key
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.processes.elastic import HEAD_KEYS, SERVER_KEY, WORKER_KEY
from meshloom.launch.role import Role
from meshloom.parameters.model import build_model

__all__ = ["World", "read_content"]
STOP = 15


_BUILDING = threading.Lock()  # processes have generators of their own, threads have one


class _Server(ServerProcess):
    held: threading.Event  # set when there are parameters

    def _hold(self, content: Content | None) -> Parameters:
        with _BUILDING:
            found = super()._hold(content)
        self.held.set()
        return found


class World:
    """The servers of a run in `directory`. told: by server, what it told. Workers are run by `work`."""

    def __init__(self, job: Job, plan: str, directory: Path, **settings: Any) -> None:
        self.job, self.plan, self.directory = job, Plan.parse(plan), directory
        self.settings = AsynchronousSettings(**{"steps": job.steps, "snapshot_every": 5, **settings})
        self.told: list[list[Mapping[str, Any]]] = [[] for _ in range(self.plan.servers)]
        self.errors: list[BaseException] = []
        self.finished = threading.Event()
        self._stop: list[int] = []

    @contextmanager
    def serving(self) -> Iterator[World]:
        """While this lasts, the servers are there."""
        (self.directory / "due").mkdir(parents=True, exist_ok=True)
        server, worker = make_keys()
        self.worker_key = worker
        write_key(self.directory / SERVER_KEY, server)
        write_key(self.directory / WORKER_KEY, worker)
        head, other = make_keys()
        write_key(self.directory / HEAD_KEYS[0], head)
        write_key(self.directory / HEAD_KEYS[1], other)
        with ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                for _ in range(self.plan.servers + 1)
            ]
            for each in sockets:
                each.setblocking(False)
            self.addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets[:-1])
            held = [threading.Event() for _ in range(self.plan.servers)]
            threads = [
                threading.Thread(target=self._serve, args=(number, sockets, held[number]))
                for number in range(self.plan.servers)
            ]
            for thread in threads:
                thread.start()
            try:
                for each in held:  # before a worker builds and draws
                    assert each.wait(WAIT_SECONDS)
                yield self
            finally:
                self._stop.append(STOP)
                for thread in threads:
                    thread.join()

    def work(self, job: Job | None = None, stop: list[int] | None = None) -> None:
        """Be a worker, to the end."""
        description = ask(self.addresses[0], self.worker_key, WAIT_SECONDS, [])
        assert description is not None
        self.worker(description, job, stop).run()

    def worker(
        self, description: RunDescription, job: Job | None = None, stop: list[int] | None = None
    ) -> WorkerProcess:
        return WorkerProcess(
            job or self.job,
            self.plan,
            description,
            self.addresses[0],
            self.worker_key,
            WAIT_SECONDS,
            stop if stop is not None else [],
            lambda event: True,
            WorkerReplica(job or self.job, self.plan),
        )

    def updates(self) -> list[int]:
        """Their numbers, in order."""
        return [event["version"] for event in self.told[0] if event["event"] == "update"]

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers in the snapshot after the last update."""
        contents = [
            read_snapshot(self.directory / f"server-{number}" / snapshot_name(self.settings.steps))[1]
            for number in range(self.plan.servers)
        ]
        replica = WorkerModel(self.job, self.plan, build_model(self.job, torch.device("cpu"), None))
        replica.load([content.values for content in contents], contents[0].buffers)
        return dict(replica.model.state_dict())

    def count(self, name: str, server: int = 0) -> int:
        """What the server has counted in the end."""
        return [event[name] for event in self.told[server] if event["event"] == "counts"][-1]

    def _serve(self, number: int, sockets: list[socket.socket], held: threading.Event) -> None:
        own = [sockets[number], *([sockets[-1]] if number == 0 and self.plan.servers > 1 else [])]
        listening = tuple(os.dup(each.fileno()) for each in own)  # ZeroMQ closes them
        role = Role(
            kind="server", target="", plan=str(self.plan), settings="", number=number, directory=str(self.directory), addresses=self.addresses,
            head=f"127.0.0.1:{sockets[-1].getsockname()[1]}", listening=listening,
        )  # fmt: skip

        def tell(event: Mapping[str, object]) -> None:
            self.told[number].append(dict(event))
            if event["event"] == "finished":
                self.finished.set()

        try:
            with _BUILDING:
                server = _Server(role, self.job, self.plan, self.settings, self._stop, tell)
            server.held = held
            server.run()
        except BaseException as error:
            self.errors.append(error)
            held.set()
