"""Rates of computation and communication of a machine, by which sharding and stages are chosen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from meshloom.machine.links import Collective as LinkCollective
from meshloom.machine.machine import Machine, collective_seconds, this_machine
from meshloom.program.cost.cost import Cost
from meshloom.program.operators.collectives import Collective

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
_MANY = 2.0**26  # bytes, for the slope of a line


@dataclass(frozen=True, kw_only=True)
class LinearSeconds:
    """Seconds of a collective: latency_seconds + bytes of a rank's input / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a rank computes per second, and the cost of collectives.

    flops_per_second, bytes_per_second: of operators; one takes as long as the slower of its two (the
        roofline; Williams et al., 2009). start_seconds: of any collective. latency_seconds: of each message.
        link_bytes_per_second: of each rank's link. Collectives are rings of these: an all-reduce sends 2(N-1)
        messages of S/N one after another (Patarasuk & Yuan, 2009).
    measured: of collectives among these ranks, used instead of the above.
    memory_price: cost of a byte of parameters, gradients and optimizer state, in bytes sent per step: tp is
        used to shard memory, and dp to shard the batch. With 0, large batches of small models are sharded by
        samples, which replicates all parameters and makes a step of the benchmark GPT (batch 64, Gloo) 6 %
        shorter.
    send: of a message from one rank to another, if measured.
    machine: measurements of its operators, if any.
    source: origin of the rates, for messages.
    """

    flops_per_second: float = 5e10
    bytes_per_second: float = 1e10
    start_seconds: float = 3e-4
    latency_seconds: float = 2e-4
    link_bytes_per_second: float = 1e9
    measured: Mapping[Collective, LinearSeconds] = field(default_factory=dict[Collective, LinearSeconds])
    memory_price: float = 100.0
    send: LinearSeconds | None = None
    machine: Machine | None = None
    source: str = "given"

    def collective_seconds(self, collective: Collective, num_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective with an input of `num_bytes` on every rank.

        >>> rates = Rates(start_seconds=1.0, latency_seconds=2.0, link_bytes_per_second=10.0)
        >>> rates.collective_seconds("all_reduce", 100.0, 2), rates.collective_seconds("all_gather", 50.0, 2)
        (15.0, 8.0)
        """
        line = self.measured.get(collective)
        if line is not None:
            return line.seconds(num_bytes)
        n = num_ranks
        messages = 2 * (n - 1) if collective == "all_reduce" else n - 1
        size = num_bytes if collective == "all_gather" else num_bytes / n
        return self.start_seconds + messages * (self.latency_seconds + size / self.link_bytes_per_second)

    def message_seconds(self, num_bytes: float) -> float:
        """Seconds from one rank to another.

        >>> Rates(latency_seconds=2.0, link_bytes_per_second=10.0).message_seconds(50.0)
        7.0
        """
        line = self.send or LinearSeconds(
            latency_seconds=self.latency_seconds, bytes_per_second=self.link_bytes_per_second
        )
        return line.seconds(num_bytes)

    def node_seconds(self, cost: Cost) -> float:
        """Seconds of an operator on one device, forward and backward."""
        return self.forward_seconds(cost) + self.backward_seconds(cost)

    def forward_seconds(self, cost: Cost) -> float:
        """Seconds of its forward."""
        moved = cost.read_bytes + cost.written_bytes
        return max(cost.flops / self.flops_per_second, moved / self.bytes_per_second)

    def backward_seconds(self, cost: Cost) -> float:
        """Seconds of its backward."""
        moved = cost.backward_read_bytes + cost.backward_written_bytes
        return max(cost.backward_flops / self.flops_per_second, moved / self.bytes_per_second)


def rates_of(machine: Machine, num_ranks: int, dtype: str = "float32") -> Rates:
    """The measured rates of a machine: its largest matrix products and elementwise operators, and the
    collectives of `num_ranks` ranks.

    Links that were not measured have those of `default_rates`.
    """
    known = default_rates(machine.device)
    measured = {link.collective for link in machine.links}
    lines = {each: _line(machine, each, num_ranks) for each in COLLECTIVES if each in measured}
    link = lines["all_gather"].bytes_per_second if "all_gather" in lines else known.link_bytes_per_second
    return replace(
        known,
        flops_per_second=machine.operation("matmul", dtype).rate,
        bytes_per_second=machine.operation("elementwise", dtype).rate,
        link_bytes_per_second=link,
        measured=lines,
        send=_line(machine, "send", 2) if "send" in measured else None,
        machine=machine,
        source=_source(machine),
    )


def _source(machine: Machine) -> str:
    over = f" over {machine.transport}" if machine.transport else ""
    return f"measured on {machine.name} at {time.strftime('%Y-%m-%d %H:%M', time.localtime(machine.measured_at))}{over}"


def _line(machine: Machine, collective: LinkCollective, num_ranks: int) -> LinearSeconds:
    start, end = (collective_seconds(machine, collective, size, num_ranks) for size in (0.0, _MANY))
    # a rank alone sends nothing
    slope = _MANY / (end - start) if end > start else math.inf
    return LinearSeconds(latency_seconds=start, bytes_per_second=slope)


def rates_here(device: str, num_ranks: int, dtype: str = "float32") -> Rates:
    """Rates of this machine as measured by `meshloom calibrate`, or else `default_rates`. Raises
    `MachineError` if its file is broken."""
    machine = this_machine(device)
    return rates_of(machine, num_ranks, dtype) if machine is not None else default_rates(device)


def default_rates(device: str) -> Rates:
    """Rates without measurements. cpu: one core, and Gloo on one host. Others: a recent GPU in mixed
    precision, and NCCL over NVLink."""
    source = "default rates; meshloom calibrate measures this machine's"
    if device == "cpu":
        return Rates(source=source)
    return Rates(
        flops_per_second=1e14, bytes_per_second=1.5e12, start_seconds=1e-5, latency_seconds=3e-6, link_bytes_per_second=1.5e11, source=source
    )  # fmt: skip
