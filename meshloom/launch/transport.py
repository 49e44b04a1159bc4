"""The transport of each group of ranks, by the hosts that they run on.

all on one host              shared memory
k > 1 on each of n hosts     shared memory within a host, Gloo between hosts (comm/network/hosts.py)
anything else                Gloo
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from meshloom.comm.network.signed_store import SignedStore
from meshloom.core.errors import DeviceError
from meshloom.core.mesh import AXES, Mesh
from meshloom.core.units import format_count
from meshloom.launch.names import rank_name

TRANSPORTS = ("auto", "gloo")
Hosts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Transports:
    """hosts: by rank, the identity of its host. gloo_because: why no rank uses shared memory; "": some do."""

    hosts: tuple[str, ...]
    gloo_because: str = ""

    def layout(self, ranks: Sequence[int]) -> Hosts:
        """For each host, in order of its first rank, the positions in `ranks` of those that run on it.

        >>> Transports(hosts=("a", "a", "b", "b")).layout([0, 2, 3])
        ((0,), (1, 2))
        """
        by_host: dict[str, list[int]] = {}
        for number, rank in enumerate(ranks):
            by_host.setdefault(self.hosts[rank], []).append(number)
        return tuple(map(tuple, by_host.values()))

    def layers(self, ranks: Sequence[int]) -> Hosts | None:
        """`layout` if the group uses shared memory: all ranks on one host, or the same number k > 1 on each.
        None: Gloo for all of it."""
        hosts = self.layout(ranks)
        return hosts if not self.gloo_because and (len(hosts) == 1 or _is_grid(hosts)) else None

    def where(self, rank: int, ranks: Sequence[int]) -> str:
        """The host of `rank`, by name, if `ranks` are on several hosts with different names; otherwise "".

        >>> Transports(hosts=("node1 ...", "node1 ...", "node2 ...")).where(2, [1, 2])
        ' on node2'
        """
        hosts = {self.hosts[each] for each in ranks}
        names = {host.split()[0] for host in hosts}
        return f" on {self.hosts[rank].split()[0]}" if len(names) == len(hosts) > 1 else ""

    def text(self, mesh: Mesh) -> str:
        """The transports of the ranks of `mesh`, as in "4 ranks, ...".

        >>> Transports(hosts=("a", "a", "b", "b")).text(Mesh(dp=2, tp=2))
        'communicating along dp over Gloo, along tp through shared memory'
        >>> Transports(hosts=("a",) * 4, gloo_because="asked for").text(Mesh(dp=4))
        'communicating over Gloo: asked for'
        """
        if self.gloo_because:
            return f"communicating over Gloo: {self.gloo_because}"
        by_axis = {axis: self._along(mesh.groups(axis)) for axis in AXES if getattr(mesh, axis) > 1}
        if len(set(by_axis.values())) == 1:
            return f"communicating {next(iter(by_axis.values()))}"
        return "communicating " + ", ".join(f"along {axis} {how}" for axis, how in by_axis.items())

    def _along(self, groups: Sequence[Sequence[int]]) -> str:
        return " or ".join(dict.fromkeys(_how(self.layout(ranks)) for ranks in groups))


def agreed_transports(store: SignedStore, mesh: Mesh, transport: str, missing: str) -> Transports:
    """Exchange hosts and wishes with the other ranks. One without shared memory decides for all.

    transport: one of `TRANSPORTS`. missing: why this rank cannot use shared memory; "": it can.
    """
    check_transport(transport)
    mine = json.dumps([host_identity(), transport, missing])
    all_ranks = [json.loads(each) for each in store.all_gather("transport", mine)]
    hosts = tuple(host for host, _, _ in all_ranks)
    if any(wanted == "gloo" for _, wanted, _ in all_ranks):
        return Transports(hosts=hosts, gloo_because="asked for")
    without = [(other, why) for other, (_, _, why) in enumerate(all_ranks) if why]
    if not without:
        return Transports(hosts=hosts)
    other, why = without[0]
    who = "" if len(without) == mesh.size else f"{rank_name(other, mesh)}: "
    return Transports(hosts=hosts, gloo_because=f"{who}{why}")


def check_transport(transport: str) -> None:
    """Raises `DeviceError` if `transport` is none of `TRANSPORTS`."""
    if transport not in TRANSPORTS:
        raise DeviceError(f"transport={transport} is not known. Use {' or '.join(TRANSPORTS)}.")


def host_identity() -> str:
    """An identity that two processes share only if they can map each other's memory and see each other end.

    That takes one kernel, one user and one PID namespace. Containers that share these but not the network may
    be isolated by rules that cannot be read here, so they count as different hosts: slower, always correct.
    """
    facts = [socket.gethostname(), str(os.getuid())]
    with suppress(OSError):  # not shown here: the host's name has to do
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts += [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "user", "net")]
    return " ".join(facts)


def _is_grid(hosts: Hosts) -> bool:
    """Whether all hosts have the same number of ranks, several, and the i-th ranks of the hosts ascend, as
    groups of torch.distributed require."""
    same = {len(numbers) for numbers in hosts}
    return (
        len(same) == 1
        and same != {1}
        and all(here < there for column in zip(*hosts, strict=True) for here, there in pairwise(column))
    )


def _how(hosts: Hosts) -> str:
    if len(hosts) == 1:
        return "through shared memory"
    if _is_grid(hosts):
        return f"through shared memory on each of {len(hosts)} machines and over Gloo between them"
    sizes = Counter(len(numbers) for numbers in hosts)
    if set(sizes) == {1}:
        return "over Gloo"
    if len(sizes) == 1:
        return f"over Gloo (ranks of {len(hosts)} machines are interleaved)"
    uneven = [
        f"{format_count(size, 'rank')} on {format_count(number, 'machine')}"
        for size, number in sorted(sizes.items())
    ]
    return f"over Gloo ({' and '.join(uneven)})"
