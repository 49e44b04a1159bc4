"""Seconds of an all-reduce by formula.

N ranks contribute S bytes each; a message takes `a` seconds plus its bytes at B bytes/s, in both directions
at the same time. Additions count as free.

    ring      2(N-1) a  +  2(N-1)/N S/B     Patarasuk & Yuan, 2009
    server    2 a  +  2 N S/B               k servers divide the second term by k
"""

from __future__ import annotations


def ring_seconds(num_bytes: float, num_ranks: int, latency_seconds: float, bytes_per_second: float) -> float:
    """Seconds of a ring all-reduce: 2(N-1) steps, each of 1/N of the bytes.

    >>> ring_seconds(8, 4, 0.0, 1.0), ring_seconds(0, 4, 1.0, 1.0)
    (12.0, 6.0)
    """
    steps = 2 * (num_ranks - 1)
    return steps * latency_seconds + steps / num_ranks * num_bytes / bytes_per_second


def server_seconds(
    num_bytes: float, num_workers: int, latency_seconds: float, bytes_per_second: float, num_servers: int = 1
) -> float:
    """Seconds of a push and a pull of all workers; servers divide the bytes evenly and have a link each.

    >>> server_seconds(8, 4, 0.0, 1.0), server_seconds(8, 4, 0.0, 1.0, num_servers=2)
    (64.0, 32.0)
    """
    return 2 * latency_seconds + 2 * num_workers * num_bytes / (num_servers * bytes_per_second)
