"""Two hosts on this machine: network namespaces joined by a wire. Ranks in one see nothing of the other's
network."""

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
def ranks_on(
    hosts: Sequence[str], command: Sequence[str], places: Sequence[int]
) -> Generator[list[subprocess.Popen[str]]]:
    """Python with the arguments `command`, once per rank, as torchrun would start it. places: by rank, the
    number of its host."""
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
            processes.append(_start(hosts[place], [sys.executable, *command], environment))
        yield processes
    finally:
        _end(processes)


@contextmanager
def running(
    hosts: Sequence[str], commands: Sequence[Sequence[str]], directory: Path
) -> Generator[list[subprocess.Popen[str]]]:
    """One command on each host, in `directory`, where they leave what they like. What they have started ends
    with them."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for host, command in zip(hosts, commands, strict=True):
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": WIRE,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "TMPDIR": str(directory),
            }
            processes.append(_start(host, command, environment, directory))
        yield processes
    finally:
        _end(processes)


def cut(host: str) -> None:
    """Pull the cable."""
    _ip("-n", host, "link", "set", WIRE, "down")


def mend(host: str) -> None:
    """Put it back."""
    _ip("-n", host, "link", "set", WIRE, "up")


def _start(
    host: str, command: Sequence[str], environment: dict[str, str], directory: Path | None = None
) -> subprocess.Popen[str]:
    """In the namespace, under its name as the host's."""
    named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', host]
    words = ["ip", "netns", "exec", host, *named, *command]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=directory
    )


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()  # torchrun ends its ranks
    for process in processes:
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
