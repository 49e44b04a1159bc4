"""Seconds of an all-reduce by formula, and the fastest algorithm.

N ranks contribute S bytes each; a message takes `a` seconds plus its bytes at B bytes/s, in both directions
at the same time. Additions count as free.

    ring            2(N-1) a  +  2(N-1)/N S/B                                 Patarasuk & Yuan, 2009
    tree            2 log2 N (a + S/B)                                        Thakur, Rabenseifner & Gropp, 2005
    halving         2 log2 N a  +  2(N-1)/N S/B                               the same; not a power of two: 2 (a + S/B) more
    hierarchical    rings in hosts of k ranks, then between H hosts, each rank for 1/k of the bytes
    server          2 a  +  2 N S/B                                           k servers divide the second term by k
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshloom.core.errors import MachineError
from meshloom.core.units import format_bytes, format_seconds

ALGORITHMS = ("ring", "tree", "halving", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class AlgorithmChoice:
    """The fastest algorithm. seconds: measured or predicted. reason: compares it with the others."""

    algorithm: str
    seconds: float
    reason: str


def choose_algorithm(
    num_bytes: int, num_ranks: int, num_hosts: int, latency_seconds: float, bytes_per_second: float, *,
    inside_latency_seconds: float | None = None, inside_bytes_per_second: float | None = None,
    own_seconds: float | None = None, measured: Mapping[str, float] = MappingProxyType({}),
) -> AlgorithmChoice:  # fmt: skip
    """The fastest algorithm, of the explicit ones and the backend's own. Raises `MachineError`.

    latency_seconds, bytes_per_second: of a message over the slowest link: between hosts, or inside the only
        one. All hosts have equally many ranks.
    inside_latency_seconds, inside_bytes_per_second: of a message inside a host; None: the same.
    own_seconds: measured for the backend's own all-reduce, which is chosen if none is faster.
    measured: algorithm -> measured seconds, instead of its formula.

    >>> choose_algorithm(64 * 2**20, 5, 5, 1e-3, 128 * 2**20).reason
    'ring: 64 MiB over 5 ranks, 808 ms against 1.76 s (halving), 3.01 s (tree)'
    >>> choose_algorithm(2**10, 5, 5, 1e-3, 128 * 2**20, own_seconds=0.003).reason
    'all_reduce: 1 KiB over 5 ranks, 3 ms against 6.03 ms (halving), 6.05 ms (tree), 8.01 ms (ring)'
    """
    if num_hosts < 1 or num_ranks % num_hosts:
        raise MachineError(
            f"{num_ranks} ranks cannot be equally many on each of {num_hosts} hosts. Give a number of hosts that divides the ranks."
        )
    link = latency_seconds, bytes_per_second
    formulas = {"ring": ring_seconds, "halving": halving_seconds, "tree": tree_seconds}
    candidates = {name: seconds(num_bytes, num_ranks, *link) for name, seconds in formulas.items()}
    if 1 < num_hosts < num_ranks:
        inside = inside_latency_seconds or latency_seconds, inside_bytes_per_second or bytes_per_second
        ranks_per_host = num_ranks // num_hosts
        candidates["hierarchical"] = hierarchical_seconds(
            num_bytes, num_hosts, ranks_per_host, *link, *inside
        )
    candidates |= measured
    if own_seconds is not None:
        candidates = {"all_reduce": own_seconds, **candidates}
    best, *others = sorted(candidates, key=lambda name: candidates[name])
    against = ", ".join(f"{format_seconds(candidates[name])} ({name})" for name in others)
    reason = f"{best}: {format_bytes(num_bytes)} over {num_ranks} ranks, {format_seconds(candidates[best])} against {against}"
    return AlgorithmChoice(algorithm=best, seconds=candidates[best], reason=reason)


def ring_seconds(num_bytes: float, num_ranks: int, latency_seconds: float, bytes_per_second: float) -> float:
    """Seconds of a ring all-reduce: 2(N-1) steps, each of 1/N of the bytes.

    >>> ring_seconds(8, 4, 0.0, 1.0), ring_seconds(0, 4, 1.0, 1.0)
    (12.0, 6.0)
    """
    steps = 2 * (num_ranks - 1)
    return steps * latency_seconds + steps / num_ranks * num_bytes / bytes_per_second


def tree_seconds(num_bytes: float, num_ranks: int, latency_seconds: float, bytes_per_second: float) -> float:
    """Seconds of an all-reduce on a binomial tree: 2 ceil(log2 N) messages of all bytes.

    >>> tree_seconds(8, 4, 1.0, 8.0), tree_seconds(8, 5, 1.0, 8.0)
    (8.0, 12.0)
    """
    return 2 * _log2(num_ranks) * (latency_seconds + num_bytes / bytes_per_second)


def halving_seconds(
    num_bytes: float, num_ranks: int, latency_seconds: float, bytes_per_second: float
) -> float:
    """Seconds of recursive halving and doubling; beyond a power of two with two more messages of all bytes.

    >>> halving_seconds(8, 4, 1.0, 1.0), halving_seconds(8, 5, 1.0, 1.0)
    (16.0, 34.0)
    """
    power = 1 << (num_ranks.bit_length() - 1)
    folding = 2 * (latency_seconds + num_bytes / bytes_per_second) if power < num_ranks else 0.0
    moving = 2 * (power - 1) / power * num_bytes / bytes_per_second
    return folding + 2 * _log2(power) * latency_seconds + moving


def hierarchical_seconds(
    num_bytes: float, num_hosts: int, ranks_per_host: int, latency_seconds: float, bytes_per_second: float,
    inside_latency_seconds: float, inside_bytes_per_second: float,
) -> float:  # fmt: skip
    """Seconds of rings inside hosts, then between them for each rank's share; ranks of a host share its link.

    >>> hierarchical_seconds(8, 4, 1, 0.0, 1.0, 0.0, 1.0) == ring_seconds(8, 4, 0.0, 1.0)
    True
    >>> hierarchical_seconds(8, 2, 2, 0.0, 1.0, 0.0, 8.0)
    9.0
    """
    inside = ring_seconds(num_bytes, ranks_per_host, inside_latency_seconds, inside_bytes_per_second)
    return inside + ring_seconds(num_bytes, num_hosts, latency_seconds, bytes_per_second)


def server_seconds(
    num_bytes: float, num_workers: int, latency_seconds: float, bytes_per_second: float, num_servers: int = 1
) -> float:
    """Seconds of a push and a pull of all workers; servers divide the bytes evenly and have a link each.

    >>> server_seconds(8, 4, 0.0, 1.0), server_seconds(8, 4, 0.0, 1.0, num_servers=2)
    (64.0, 32.0)
    """
    return 2 * latency_seconds + 2 * num_workers * num_bytes / (num_servers * bytes_per_second)


def _log2(num_ranks: int) -> int:
    """Rounded up."""
    return (num_ranks - 1).bit_length()
