"""Two hosts on this machine: network namespaces joined by a wire. Ranks in one see nothing of the other's network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

PORT = 29500  # nobody else is in a new namespace
WIRE = "wire0"
ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def why_not() -> str:
    """Why there can be none here; "": there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip"
    name = f"meshloom-{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@contextmanager
def two_hosts() -> Generator[list[str]]:
    """The names of the two namespaces, which end with the context."""
    names = [f"meshloom-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def ranks_on(hosts: Sequence[str], command: Sequence[str], places: Sequence[int]) -> Generator[list[subprocess.Popen[str]]]:
    """Python with the arguments `command`, once per rank, as torchrun would start it. places: by rank, the number of its host."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, place in enumerate(places):
            told = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": places[:rank].count(place),
                "LOCAL_WORLD_SIZE": places.count(place),
                "MASTER_ADDR": ADDRESSES[places[0]],
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": WIRE,
                "OMP_NUM_THREADS": 1,
                "PYTHONPATH": Path(__file__).parents[1],
            }
            environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
            words = ["ip", "netns", "exec", hosts[place], sys.executable, *command]
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
