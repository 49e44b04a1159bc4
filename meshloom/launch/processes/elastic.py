"""Starts servers and workers of an asynchronous run on this machine, restarts killed servers, and ends them.

    launcher     holds the sockets that servers listen on, so that restarted servers keep their addresses, and receives reports
    server 0     has the head too
    server k     communicates with the head over a separate socket, with keys that workers do not have
    worker       like one that joins from elsewhere

When a server is killed, all end and are restarted: they go on from a snapshot together. A killed worker is not
restarted. A worker or server that fails ends the run: the others would fail likewise.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from meshloom.comm.messaging.keys import make_keys, write_key
from meshloom.comm.messaging.sockets import resolve_address
from meshloom.core.errors import EndpointError
from meshloom.launch.child_environment import role_environment
from meshloom.launch.failure import EndedError
from meshloom.launch.processes.children import Children
from meshloom.launch.processes.guard import Guard
from meshloom.launch.processes.hang import process_state
from meshloom.launch.processes.rank_process import RankProcess
from meshloom.launch.role import Role

MOST_ENDS = 5  # of a server, without an update in between
STOPPED_SECONDS = 10.0  # how long a server may be stopped (SIGSTOP), while all workers wait for it
WORKER_KEY, SERVER_KEY, HEAD_KEYS = "worker.key", "server.key", ("head-server.key", "head-worker.key")
_WILDCARDS = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True, kw_only=True)
class RoleCommand:
    """The module that all processes run, the job's FILE.py:NAME, and `words`: its sys.argv after its name."""

    module: str
    target: str
    plan: str
    settings: str
    words: tuple[str, ...] = ()


class ServerSockets:
    """The sockets on which servers listen, held by the launcher for restarted servers. A context manager.

    addresses: of the servers, as `listen` names the host. reached: the same as this machine reaches them.
    head: where server 0 listens for the others; "" if there are none.
    """

    def __init__(self, listen: str, num_servers: int) -> None:
        self._stack = ExitStack()
        with ExitStack() as building:
            host, port = resolve_address(listen)[:2]
            self._listening = [
                building.enter_context(_listen(host, port + number if port else 0))
                for number in range(num_servers)
            ]
            self._head = building.enter_context(_listen(host, 0)) if num_servers > 1 else None
            self._stack = building.pop_all()
        ports = [each.getsockname()[1] for each in self._listening]
        shown = listen.rpartition(":")[0]
        here = shown
        if shown in _WILDCARDS:
            here = "127.0.0.1" if shown == _WILDCARDS[0] else "[::1]"
        self.addresses = tuple(f"{shown}:{port}" for port in ports)
        self.reached = tuple(f"{here}:{port}" for port in ports)
        self.head = f"{here}:{self._head.getsockname()[1]}" if self._head is not None else ""

    def descriptors(self, number: int) -> tuple[int, ...]:
        """Those that server `number` gets."""
        own = [self._listening[number], *([self._head] if self._head is not None and number == 0 else [])]
        return tuple(each.fileno() for each in own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class ElasticProcesses:
    """A context manager.

    directory: of this run alone.
    listen: HOST:PORT of server 0; server k has the k-th port after it, if that is not 0.
    Raises `EndpointError` for an address that cannot be bound.
    """

    def __init__(
        self, program: RoleCommand, directory: Path, listen: str, *, num_servers: int, num_workers: int
    ) -> None:
        self._program, self._directory, self._num_workers = program, directory, num_workers
        self._command = [sys.executable, "-m", program.module, str(directory)]
        self._stack = ExitStack()
        guard = self._stack.enter_context(Guard())
        self._children = Children(guard)
        # killing loses nothing: snapshots are complete at any moment
        self._stack.callback(self._children.close)
        self._servers: dict[int, RankProcess] = {}
        self._workers: list[RankProcess] = []
        self._running: dict[int, float] = {}  # when each server was last seen not to be stopped
        self._ends: Counter[str] = Counter()  # of each server, since the newest update
        self._restarting = False  # whether servers are to end, so that all are restarted
        self._notes: list[str] = []
        self._dismissed = False
        with self._stack as building:
            guard.removes(directory.resolve())
            _write_keys(directory)
            self._sockets = building.enter_context(ServerSockets(listen, num_servers))
            self._stack = building.pop_all()

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT of every server."""
        return self._sockets.addresses

    def start(self) -> None:
        """All servers, and the workers."""
        self._start_servers()
        for number in range(self._num_workers):
            role = self._role("worker", number, self._sockets.reached, "")
            self._workers.append(self._start("a worker", "[worker]", role, ()))

    @property
    def worker_key(self) -> Path:
        """The key file that a joining worker needs."""
        return self._directory / WORKER_KEY

    def starting(self) -> bool:
        """Whether a worker that was started here has not been admitted yet."""
        return any(worker.exit_code is None and not worker.joined for worker in self._workers)

    def updated(self) -> None:
        """There was an update: count the ends of each server anew."""
        self._ends.clear()

    def poll(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Reports, each with the name of its process, after waiting for the first at most this long.

        Raises `EndedError` when a process has failed.
        """
        self._children.listen(seconds)
        self._kill_stopped_servers()
        ended = self._children.reap_ended()
        reports = [(process, event) for process in self._children.processes for event in process.events]
        for process, event in reports:
            process.events.clear()
            if event["event"] == "number":  # server 0 has assigned the worker's number
                process.name, process.prefix = f"worker {event['worker']}", f"[worker {event['worker']}]"
        self._handle_ended(ended)
        return [(process.name, event) for process, event in reports]

    def stopped(self) -> list[str]:
        """Names of processes that are stopped (SIGSTOP)."""
        return [
            each.name
            for each in self._children.processes
            if each.exit_code is None and process_state(each.group).state == "T"
        ]

    def ended_workers(self) -> list[str]:
        """How failed and killed workers ended, each in a few words."""
        return [f"{worker.name} {worker.how_it_ended}" for worker in self._workers if worker.exit_code]

    def take_notes(self) -> list[str]:
        """Notes for the user about processes that have ended."""
        notes, self._notes = self._notes, []
        return notes

    def dismiss(self, workers_seconds: float, servers_seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """The run is over: wait for workers to end, then ask servers to end; the reports until then."""
        self._dismissed = True
        reports = self._wait(self._workers, workers_seconds)
        for server in self._servers.values():
            server.send(signal.SIGTERM)
        return reports + self._wait(list(self._servers.values()), servers_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()

    def _wait(self, processes: Sequence[RankProcess], seconds: float) -> list[tuple[str, dict[str, Any]]]:
        reports: list[tuple[str, dict[str, Any]]] = []
        deadline = time.monotonic() + seconds
        while any(each.exit_code is None for each in processes) and time.monotonic() < deadline:
            reports += self.poll(0.02)
        return reports + self.poll(0.0)

    def _kill_stopped_servers(self) -> None:
        """Kill servers that are stopped for too long, so that they are restarted: all workers need them."""
        now = time.monotonic()
        for number, server in self._servers.items():
            if server.exit_code is not None or process_state(server.group).state != "T":
                self._running[number] = now
            elif now > self._running[number] + STOPPED_SECONDS:
                self._notes.append(
                    f"server {number} has been stopped (SIGSTOP) for {STOPPED_SECONDS:g} s, and all workers need it: it is killed"
                )
                server.send(signal.SIGKILL)
                self._running[number] = now

    def _start_servers(self) -> None:
        for number in range(len(self.addresses)):
            self._running[number] = time.monotonic()
            descriptors = self._sockets.descriptors(number)
            role = self._role("server", number, self.addresses, self._sockets.head)
            role = replace(role, listening=descriptors)
            self._servers[number] = self._start(f"server {number}", f"[server {number}]", role, descriptors)

    def _role(
        self, kind: Literal["server", "worker"], number: int, addresses: tuple[str, ...], head: str
    ) -> Role:
        program = self._program
        return Role(
            kind=kind, target=program.target, words=program.words, plan=program.plan, settings=program.settings, number=number,
            directory=str(self._directory), addresses=addresses, head=head, key=str(self.worker_key),
        )  # fmt: skip

    def _start(self, name: str, prefix: str, role: Role, passed: Sequence[int]) -> RankProcess:
        environment = role_environment(role, self._num_workers)
        return self._children.start(name, prefix, self._command, environment, passed)

    def _handle_ended(self, ended: Sequence[RankProcess]) -> None:
        if self._dismissed:
            return
        for process in ended:
            failure = process.failure
            if failure is not None and failure.kind and not failure.consequence:
                raise EndedError(str(failure.of(process.name)), failure.exit_code)
            if process in self._workers and process.exit_code:
                self._notes.append(f"{process.name} {process.how_it_ended}; the run goes on")
        servers = list(self._servers.values())
        ended_servers = [server for server in servers if server in ended]
        if ended_servers and not self._restarting:
            # one that has only lost another is not the cause
            self._end_servers(
                min(ended_servers, key=lambda each: bool(each.failure and each.failure.consequence))
            )
        if self._restarting and all(server.exit_code is not None for server in servers):
            self._restarting = False
            for server in servers:
                self._children.remove(server)
            self._start_servers()

    def _end_servers(self, ended: RankProcess) -> None:
        """One has ended: end the others, too."""
        self._restarting = True
        self._ends[ended.name] += 1
        if self._ends[ended.name] >= MOST_ENDS:
            raise EndedError(
                f"{ended.name} has ended {MOST_ENDS} times without an update in between; the last time it {ended.how_it_ended}.",
                1,
            )
        self._notes.append(f"{ended.name} {ended.how_it_ended}; it is restarted")
        for server in self._servers.values():
            server.send(signal.SIGKILL)


def _write_keys(directory: Path) -> None:
    for names in ((SERVER_KEY, WORKER_KEY), HEAD_KEYS):
        for name, key in zip(names, make_keys(), strict=True):
            write_key(directory / name, key)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), port), family=family)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EndpointError(
            f"Cannot listen at {host}:{port}: {why}. Give an address of this machine and a free port, or port 0."
        ) from None
    listening.setblocking(False)
    return listening
