"""Seconds of a collective on a cluster: the least of ring, tree and two levels, as far as links and rails let each.

    ring        all ranks one after the other, host by host           every step waits for the slowest link
    tree        within hosts, then among them; all-reduce, broadcast  few steps
    two levels  shares within hosts, each share among hosts           the fabric is passed in parts, one per rank of a host
    in switch   the switch of a host adds                             all-reduce

(Patarasuk & Yuan, 2009; Thakur et al., 2005.) Within a host as many rings or trees run side by side as the links allow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from meshloom.clusters.cluster import Cluster, Device, HostLinks
from meshloom.clusters.rings import num_rings, num_trees
from meshloom.clusters.work import Collective
from meshloom.core.errors import MachineError

# How often a ring passes the other ranks' shares of the tensor on.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
IN_TREES = ("all_reduce", "broadcast")


def collective_seconds(
    cluster: Cluster, collective: Collective, num_bytes: int, ranks: Sequence[int]
) -> float:
    """Return the seconds of one collective that `ranks` begin together.

    num_bytes: of the whole tensor: the full result of an all-gather, the full input of a reduce-scatter; of `send` the message,
        which goes from one of two ranks to the other.
    ranks: global numbers; `cluster.gpus_per_host` consecutive ones are a host.

    >>> from meshloom.clusters.cluster import named
    >>> node = named("a100-80gb-sxm")
    >>> collective_seconds(node, "all_reduce", 2**30, range(8)) > collective_seconds(node, "all_gather", 2**30, range(8))
    True
    """
    group = _group(ranks if isinstance(ranks, range) else tuple(ranks), cluster.gpus_per_host)
    if group.last >= cluster.gpus:
        raise MachineError(
            f"Rank {group.last} is none of {cluster.gpus} GPUs of {cluster.name}. Give more hosts than {cluster.hosts}."
        )
    if group.size == 1 or not num_bytes:
        return 0.0
    if collective == "send":
        return _send(cluster, num_bytes, group)
    if collective == "all_to_all" and group.hosts > 1:
        return _all_to_all(cluster, num_bytes, group)
    return min(_ways(cluster, collective, num_bytes, group))


def overlapped_seconds(device: Device, computing: float, sending: float) -> float:
    """Return the seconds of both together, each slowed while the other runs.

    >>> from meshloom.clusters.cluster import named
    >>> overlapped_seconds(named("h100-80gb-sxm").device, 2.0, 1.0) < 3.0
    True
    """
    return max(computing, sending) + (device.overlap_slowdown - 1) * min(computing, sending)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """hosts: number of hosts. gpus: of the host with the fewest ranks, those that take part, by their numbers within it.
    even: whether all hosts have as many. last: the highest rank."""

    size: int
    hosts: int
    gpus: tuple[int, ...]
    even: bool
    last: int


@cache
def _group(ranks: range | tuple[int, ...], gpus_per_host: int) -> _Group:
    per_host = Counter(rank // gpus_per_host for rank in ranks)
    fewest = min(per_host, key=lambda host: per_host[host])
    return _Group(
        size=len(ranks),
        hosts=len(per_host),
        gpus=tuple(sorted(rank % gpus_per_host for rank in ranks if rank // gpus_per_host == fewest)),
        even=len(set(per_host.values())) == 1,
        last=max(ranks),
    )


def _ways(cluster: Cluster, collective: Collective, num_bytes: int, group: _Group) -> Iterator[float]:
    yield _ring(cluster, collective, num_bytes, group)
    if collective in IN_TREES:
        yield _tree(cluster, collective, num_bytes, group)
    if group.hosts > 1 and group.even and len(group.gpus) > 1 and collective in PASSES:
        yield _two_levels(cluster, collective, num_bytes, group)
    host = cluster.host
    if collective == "all_reduce" and group.hosts == 1 and 0 < host.in_switch_ranks <= group.size:
        yield host.base_seconds + 2 * host.hop_seconds + num_bytes / host.in_switch_bytes_per_second


def _ring(cluster: Cluster, collective: Collective, num_bytes: int, group: _Group) -> float:
    passes = PASSES.get(collective, 1)
    across = group.hosts if group.hosts > 1 else 0
    steps = (group.size - across - (0 if across else 1)) * cluster.host.step_seconds
    hops = max(across - 1, 0) * cluster.fabric.hop_seconds
    moved = (group.size - 1) / group.size if collective in PASSES else 1.0
    rate = min(_ring_rate(cluster.host, group.gpus), _rails_rate(cluster, group))
    return cluster.host.base_seconds + passes * (steps + hops + moved * num_bytes / rate)


def _tree(cluster: Cluster, collective: Collective, num_bytes: int, group: _Group) -> float:
    passes = PASSES.get(collective, 1)
    hops = math.log2(len(group.gpus)) * cluster.host.hop_seconds
    hops += math.log2(group.hosts) * cluster.fabric.hop_seconds
    rate = min(_tree_rate(cluster.host, group.gpus), _rails_rate(cluster, group))
    return cluster.host.base_seconds + passes * (hops + num_bytes / rate)


def _two_levels(cluster: Cluster, collective: Collective, num_bytes: int, group: _Group) -> float:
    """Shares of the tensor among the hosts, one per rank of a host, between or beside the passes within hosts."""
    local = len(group.gpus)
    passes = PASSES[collective]
    inner = (local - 1) * cluster.host.step_seconds
    inner += (local - 1) / local * num_bytes / _ring_rate(cluster.host, group.gpus)
    rate = _rails_rate(cluster, group) / local
    outer = (group.hosts - 1) / group.hosts * num_bytes / local / rate
    hops = min(group.hosts - 1, math.log2(group.hosts) if collective == "all_reduce" else math.inf)
    return cluster.host.base_seconds + passes * (inner + outer + hops * cluster.fabric.hop_seconds)


def _all_to_all(cluster: Cluster, num_bytes: int, group: _Group) -> float:
    """What a rank sends to other hosts leaves by its own share of the rails."""
    local = len(group.gpus)
    inside = (local - 1) / group.size * num_bytes / _ring_rate(cluster.host, group.gpus) if local > 1 else 0.0
    outside = (group.size - local) / group.size * num_bytes / (_rails_rate(cluster, group) / local)
    return cluster.host.base_seconds + (group.hosts - 1) * cluster.fabric.hop_seconds + max(inside, outside)


def _send(cluster: Cluster, num_bytes: int, group: _Group) -> float:
    if group.hosts > 1:
        return cluster.fabric.hop_seconds + num_bytes / _rails_rate(cluster, group)
    return cluster.host.step_seconds + num_bytes / _ring_rate(cluster.host, group.gpus)


def _ring_rate(host: HostLinks, gpus: tuple[int, ...]) -> float:
    """Bytes that the rings of a host pass on in a second; one through switches or PCIe where no links make a ring."""
    if len(gpus) == 1:
        return math.inf
    return max(num_rings(host.links, gpus) * host.link_bytes_per_second, host.peer_bytes_per_second)


def _tree_rate(host: HostLinks, gpus: tuple[int, ...]) -> float:
    if len(gpus) == 1:
        return math.inf
    return max(num_trees(host.links, gpus) * host.link_bytes_per_second, host.peer_bytes_per_second)


def _rails_rate(cluster: Cluster, group: _Group) -> float:
    """Bytes that leave a host in a second: each rank has its share of the rails, others have theirs."""
    fabric, whole = cluster.fabric, len(group.gpus) == cluster.gpus_per_host
    if group.hosts == 1:
        return math.inf
    rails = fabric.rails * len(group.gpus) / cluster.gpus_per_host
    return (
        rails * fabric.rail_bytes_per_second * (fabric.whole_host_efficiency if whole else fabric.efficiency)
    )
