"""The faster all-reduce between the ranks of a measured machine, for small to large tensors: the transport's own, or the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.core.units import format_bytes, format_seconds
from meshloom.machine.all_reduce_costs import ring_seconds
from meshloom.machine.machine import Machine, collective_seconds

SIZES = (4 << 10, 64 << 10, 1 << 20, 25 << 20)


@dataclass(frozen=True, kw_only=True)
class FasterAllReduce:
    """Of `num_bytes` by each of `ranks` ranks. algorithm: `all_reduce`, the transport's own, or `ring`. reason: compares them."""

    ranks: int
    num_bytes: int
    algorithm: str
    seconds: float
    reason: str


def faster_all_reduces(machine: Machine, sizes: Sequence[int] = SIZES) -> list[FasterAllReduce]:
    """Of every number of ranks whose all-reduce was measured. The ring is as it was measured, else by its formula on the
    measured messages.

    >>> from meshloom.machine.machine import example_machine
    >>> [each.reason for each in faster_all_reduces(example_machine(), [25 << 20])]
    ['all_reduce: 25 MiB over 2 ranks, 27.2 ms against 28.2 ms (ring)']
    """
    return [
        _faster(machine, ranks, num_bytes)
        for ranks in sorted({link.ranks for link in machine.links if link.collective == "all_reduce"})
        for num_bytes in sizes
        if any(link.collective == "send" for link in machine.links)
    ]


def _faster(machine: Machine, ranks: int, num_bytes: int) -> FasterAllReduce:
    message = next(link for link in machine.links if link.collective == "send")
    measured = (
        link.seconds(num_bytes)
        for link in machine.links
        if link.algorithm == "ring" and (link.ranks, link.among) == (ranks, ranks)
    )
    by_formula = ring_seconds(num_bytes, ranks, message.latency_seconds, message.bytes_per_second)
    seconds = {
        "all_reduce": collective_seconds(machine, "all_reduce", num_bytes, ranks),
        "ring": next(measured, by_formula),
    }
    best, other = sorted(seconds, key=lambda name: seconds[name])
    what = f"{best}: {format_bytes(num_bytes)} over {ranks} ranks"
    reason = f"{what}, {format_seconds(seconds[best])} against {format_seconds(seconds[other])} ({other})"
    return FasterAllReduce(
        ranks=ranks, num_bytes=num_bytes, algorithm=best, seconds=seconds[best], reason=reason
    )
