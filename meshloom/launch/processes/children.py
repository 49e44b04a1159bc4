"""The child processes of this one: their output and reports are read, and none is left when this one ends.

start -> listen, reap_ended, listen, ... -> close
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from meshloom.core.mesh import Mesh
from meshloom.launch.child_environment import rank_environment
from meshloom.launch.processes.guard import Guard
from meshloom.launch.processes.rank_process import RankProcess


class Children:
    """guard: ends them if this process is killed; the caller enters and exits it. processes: as started."""

    def __init__(self, guard: Guard) -> None:
        self.processes: list[RankProcess] = []
        self._guard = guard
        self._selector = selectors.DefaultSelector()

    def start(
        self, name: str, prefix: str | None, command: Sequence[str], environment: Mapping[str, str],
        passed: Sequence[int] = (),
    ) -> RankProcess:  # fmt: skip
        """Start one more; arguments as for `RankProcess`. Raises `OSError`."""
        process = RankProcess(name, prefix, command, environment, passed)
        self.processes.append(process)
        self._guard.tell("+", process.group)
        for descriptor in process.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ, process)
        return process

    def listen(self, seconds: float) -> None:
        """Read output and reports, waiting for the first at most this long."""
        for key, _ in self._selector.select(seconds):
            if not key.data.read(key.fd):
                self._selector.unregister(key.fd)

    def reap_ended(self) -> list[RankProcess]:
        """The processes that have ended since the last call."""
        ended = [process for process in self.processes if process.reap_if_ended()]
        for process in ended:
            self._guard.tell("-", process.group)
        return ended

    def remove(self, process: RankProcess) -> None:
        """End one process, and forget it."""
        for descriptor in process.descriptors:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        process.close()
        self._guard.tell("-", process.group)
        self.processes.remove(process)

    def kill(self) -> None:
        """Kill all processes, and forget them."""
        for process in self.processes:
            process.send(signal.SIGKILL)
        while self.processes:
            self.remove(self.processes[0])

    def close(self) -> None:
        """The same, at the end."""
        try:
            self.kill()
        finally:
            self._selector.close()


def rank_environments(
    mesh: Mesh, devices: str, plan_text: str, transport: str = "auto"
) -> tuple[dist.Store, list[dict[str, str]]]:
    """The store in this process in which the ranks meet, as long as it is held; the environment of each."""
    secret = secrets.token_hex(32)
    # the store takes over a socket that is bound already, to this machine alone
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = os.dup(listener.fileno())
        store = dist.TCPStore(
            "127.0.0.1", port, None, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
    size = mesh.size
    environments = [
        rank_environment(rank, size, port, secret, devices, plan_text, transport) for rank in range(size)
    ]
    return store, environments
