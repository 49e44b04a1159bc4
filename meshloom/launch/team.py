"""The ranks of one worker of an asynchronous run: started together, ended together, and one worker to everybody else.

    launcher of the run  ----  this process  ----  rank 0   talks with servers, and tells what becomes of it
                                             ----  rank 1   ...

When one of them is killed the others end too: the worker is lost, the run goes on. When one fails, that is told to the run's launcher.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch.distributed as dist

from meshloom.launch.environment import rank_environment, with_role
from meshloom.launch.failure import EndedError
from meshloom.launch.guard import Guard
from meshloom.launch.rank_process import RankProcess, signal_name
from meshloom.launch.role import Role
from meshloom.launch.telling import tell
from meshloom.launch.wording import rank_name
from meshloom.mesh import Mesh

_CAUSE_SECONDS = 1.5  # how long the cause is waited for, once a rank has reported that another one is gone


def run_team(command: Sequence[str], role: Role, mesh: Mesh, plan_text: str, signals: Sequence[int]) -> None:
    """Start a process for each rank of `mesh`, and wait until all have ended.

    role: this worker's, which each rank gets with its number. plan_text: of the ranks among themselves.
    signals: the first lets the worker go once its share is pushed, the second ends it at once.
    Raises `EndedError` when a rank was killed or has failed.
    """
    with _Team() as team:
        team.start(command, role, mesh, plan_text)
        team.watch(signals)


class _Team:
    """The rank processes: a context manager that ends them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Team:
        self._guard = self._stack.enter_context(Guard())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for rank in self._ranks:
                rank.send(signal.SIGKILL)
            for rank in self._ranks:
                rank.close()
                self._guard.tell("-", rank.group)
        finally:
            self._selector.close()
            self._stack.close()

    def start(self, command: Sequence[str], role: Role, mesh: Mesh, plan_text: str) -> None:
        """One process for each rank; they meet in a store of this process."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
        for number in range(mesh.size):
            environment = with_role(rank_environment(number, mesh.size, port, "cpu", plan_text), replace(role, rank=number))
            rank = RankProcess(rank_name(number, mesh), None, command, environment)
            self._ranks.append(rank)
            self._guard.tell("+", rank.group)
            for descriptor in rank.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def watch(self, signals: Sequence[int]) -> None:
        """Pass on what rank 0 tells until all have ended."""
        leaving = False
        while any(rank.exit_code is None for rank in self._ranks):
            self._listen(0.05)
            for rank in self._ranks:
                if rank.bury_if_ended():
                    self._guard.tell("-", rank.group)
            self._pass_on()
            failures = [rank for rank in self._ranks if rank.failure]
            if failures:
                self._end(failures[0])
            if len(signals) > 1:
                return
            if signals and not leaving:
                leaving = True
                self._ranks[0].send(signal.SIGTERM)

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if not key.data.read(key.fd):
                self._selector.unregister(key.fd)

    def _pass_on(self) -> None:
        told, self._ranks[0].told[:] = list(self._ranks[0].told), []
        for event in told:
            tell(event)
            if event["event"] == "number":  # it has been let in
                tell({"event": "joined"})

    def _end(self, first: RankProcess) -> None:
        """Say why, once: the cause if it is heard of soon, else what was noticed first."""
        for _ in range(round(_CAUSE_SECONDS / 0.05)):
            if any(rank.failure and not rank.failure.consequence for rank in self._ranks):
                break
            self._listen(0.05)
            for rank in self._ranks:
                rank.bury_if_ended()
        cause = next((rank for rank in self._ranks if rank.failure and not rank.failure.consequence), first)
        failure = cause.failure
        assert failure is not None
        if failure.kind and not failure.consequence:
            tell({"event": "failed", **asdict(failure)})
            raise EndedError(str(failure), failure.exit_code)
        code = cause.exit_code or 0
        how = f"was killed by {signal_name(-code)}" if code < 0 else "has lost another one" if failure.consequence else f"ended with exit code {code}"
        raise EndedError(f"{cause.name} of this worker {how}, so the worker ends.", 1)
