"""Seconds of one exchange against the number of hosts: the library's own all-reduce, the ring on messages, and
parameter servers.

Three layouts, each in processes of its own: one rank on each of N hosts; two on each; N workers and k
servers, all on hosts of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from network import Host
from ranks import on_hosts
from servers import Star
from torch import Tensor

from meshloom.comm.collectives.ring import ring_group
from meshloom.comm.group import Group
from meshloom.core.mesh import Mesh
from meshloom.launch.opening import open_world
from meshloom.machine.all_reduce_costs import ring_seconds, server_seconds

NUM_BYTES = 25_000_000
ALL_REDUCES = ("gloo", "ring", "hosts")
SLOW = ("server",)  # takes several times as long as a ring, and varies less
TWO_PER_HOST = ("hosts",)
PINGS = 100
Exchange = Callable[[], None]


def time_exchanges(
    hosts: Sequence[Host],
    num_hosts: int,
    algorithms: Sequence[str],
    servers: Sequence[int],
    num_bytes: int,
    rounds: int,
    slow_rounds: int,
    bytes_per_second: float | None,
) -> list[dict[str, Any]]:
    """A record per algorithm, and one per number of servers. hosts: as many as any of the layouts needs.

    algorithms: of `ALL_REDUCES`: `gloo` is Gloo's own all-reduce, `hosts` what a plan takes by itself where there are two
    ranks on a host. bytes_per_second: of a link, for the formulas; None: as a message was measured to travel.
    """
    records: list[dict[str, Any]] = []
    alone = [name for name in algorithms if name not in TWO_PER_HOST]
    layouts: list[tuple[list[int], list[str], int]] = [(list(range(num_hosts)), alone, 0)] if alone else []
    if pairs := [name for name in algorithms if name in TWO_PER_HOST]:
        layouts.append(([number // 2 for number in range(2 * num_hosts)], pairs, 0))
    layouts += [(list(range(num_hosts + count)), ["server"], count) for count in servers]
    for places, names, count in layouts:
        answer = on_hosts(hosts, places, _time_layout, names, places, count, num_bytes, rounds, slow_rounds)[
            0
        ]
        for name in names:
            seconds = answer["seconds"][name]
            rate = bytes_per_second or answer["message_bytes_per_second"]
            records.append(
                {
                    "part": "exchange",
                    "algorithm": name,
                    "hosts": num_hosts,
                    "ranks_per_host": 2 if len(set(places)) < len(places) else 1,
                    "servers": count,
                    "bytes": num_bytes,
                    "seconds": seconds,
                    "median": statistics.median(seconds),
                    "latency_seconds": answer["latency_seconds"],
                    "message_bytes_per_second": answer["message_bytes_per_second"],
                    "bytes_per_second": rate,
                    "formula": expected_seconds(
                        name, num_bytes, num_hosts, count, answer["latency_seconds"], rate
                    ),
                }
            )
    return records


def expected_seconds(
    algorithm: str,
    num_bytes: int,
    num_hosts: int,
    num_servers: int,
    latency_seconds: float,
    bytes_per_second: float,
) -> float:
    """By the formulas of R3.3 and of meshloom.machine.all_reduce_costs. Gloo's own all-reduce is a ring; inside a host
    nothing takes time.

    >>> [expected_seconds(name, 100, 4, 0, 0.0, 100.0) for name in ALL_REDUCES]
    [1.5, 1.5, 1.5]
    >>> expected_seconds("server", 100, 4, 2, 0.0, 100.0)
    4.0
    """
    link = latency_seconds, bytes_per_second
    if algorithm == "server":
        return server_seconds(num_bytes, num_hosts, *link, num_servers)
    return ring_seconds(num_bytes, num_hosts, *link)


def _time_layout(
    names: Sequence[str],
    places: Sequence[int],
    num_servers: int,
    num_bytes: int,
    rounds: int,
    slow_rounds: int,
) -> dict[str, Any]:
    """On each rank: seconds of every round by algorithm, the same on all ranks, and what a message from rank
    0 to another host takes."""
    num_workers = len(places) - num_servers
    # shared memory inside hosts, but not between those that loopback pretends
    transport = "auto" if len(set(places)) < len(places) else "gloo"
    with open_world(Mesh(dp=len(places)), "cpu", 120.0, transport) as world, ExitStack() as closing:
        group = world.local[0].groups["dp"].group
        tensor, small = torch.empty(num_bytes // 4), torch.empty(4099)
        link = _message(group, next(rank for rank, place in enumerate(places) if place != places[0]), tensor)
        found: dict[str, list[float]] = {name: [] for name in names}
        reducing = {name: _reducing(name, group, closing) for name in names}
        for name in names:  # connects
            _seconds(group, _exchange(reducing[name], group, num_workers, small), small, num_workers)
        exchanges = {name: _exchange(reducing[name], group, num_workers, tensor) for name in names}
        for number in range(rounds):
            for name in names[:: -1 if number % 2 else 1]:
                if number < slow_rounds or name not in SLOW:
                    found[name].append(_seconds(group, exchanges[name], tensor, num_workers))
        return {"seconds": found, **link}


def _reducing(name: str, group: Group, closing: ExitStack) -> Group | None:
    """Whose all_reduce is the algorithm. None: servers."""
    if name != "ring":
        return None if name == "server" else group
    on_ring = ring_group(group)
    closing.callback(on_ring.close)
    return on_ring


def _exchange(reducing: Group | None, group: Group, num_workers: int, tensor: Tensor) -> Exchange:
    """What a rank does in one exchange of `tensor` [n]: the sum over workers takes its place."""
    if reducing is None:
        return Star(group, num_workers, tensor).exchange
    return lambda: reducing.all_reduce(tensor).wait()


def _seconds(group: Group, exchange: Exchange, tensor: Tensor, num_workers: int) -> float:
    """From when the first rank may begin to when the last is done, on the one clock of this machine; the sums
    are compared."""
    tensor.fill_(group.rank + 1.0)
    group.barrier().wait()
    span = torch.tensor([-time.monotonic(), 0.0], dtype=torch.float64)
    exchange()
    span[1] = time.monotonic()
    assert group.rank >= num_workers or bool((tensor == num_workers * (num_workers + 1) / 2).all()), (
        "the sum over workers is wrong"
    )
    group.all_reduce(span, "max").wait()
    return float(span.sum())


def _message(group: Group, peer: int, tensor: Tensor) -> dict[str, float]:
    """Seconds of a message of 4 bytes from rank 0 to `peer`, and bytes per second of `tensor`, medians; on
    the other ranks nothing that counts."""

    def there_and_back(what: Tensor) -> float:
        began = time.monotonic()
        token = torch.zeros(1)
        if group.rank == 0:
            group.send(what, peer).wait()
            group.recv(token, peer).wait()
        elif group.rank == peer:
            group.recv(what, 0).wait()
            group.send(token, 0).wait()
        return time.monotonic() - began

    latency = statistics.median(there_and_back(torch.zeros(1)) for _ in range(PINGS)) / 2
    seconds = statistics.median(there_and_back(tensor) for _ in range(3)) - latency
    group.barrier().wait()
    return {"latency_seconds": latency, "message_bytes_per_second": tensor.nbytes / max(seconds, 1e-9)}
