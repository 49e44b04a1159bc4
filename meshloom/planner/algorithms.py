"""The fastest all-reduce between the ranks of a measured machine, for small to large tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.machine.all_reduce_costs import AlgorithmChoice, choose_algorithm
from meshloom.machine.machine import Machine, collective_seconds

SIZES = (4 << 10, 64 << 10, 1 << 20, 25 << 20)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The choice for an all-reduce of `num_bytes` by each of `ranks` ranks."""

    ranks: int
    num_bytes: int
    choice: AlgorithmChoice


def chosen_algorithms(machine: Machine, sizes: Sequence[int] = SIZES) -> list[Chosen]:
    """The choices for every number of ranks whose all-reduce was measured: from measurements, else from
    formulas on the measured messages.

    >>> from meshloom.machine.machine import example_machine
    >>> [chosen.choice.reason for chosen in chosen_algorithms(example_machine(), [25 << 20])]
    ['all_reduce: 25 MiB over 2 ranks, 27.2 ms against 28.2 ms (ring), 28.2 ms (halving), 54.4 ms (tree)']
    """
    message = next((link for link in machine.links if link.collective == "send"), None)
    if message is None:
        return []
    return [
        Chosen(
            ranks=ranks,
            num_bytes=num_bytes,
            choice=choose_algorithm(
                num_bytes, ranks, 1, message.latency_seconds, message.bytes_per_second,
                own_seconds=collective_seconds(machine, "all_reduce", num_bytes, ranks),
                measured={
                    link.algorithm: link.seconds(num_bytes) for link in machine.links if link.algorithm and (link.ranks, link.among) == (ranks, ranks)
                },
            ),
        )
        for ranks in sorted({link.ranks for link in machine.links if link.collective == "all_reduce"})
        for num_bytes in sizes
    ]  # fmt: skip
