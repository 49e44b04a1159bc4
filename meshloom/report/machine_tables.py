"""What a machine does, as tables: operators by kind and size, collectives by ranks; and which all-reduce is
the fastest there."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from meshloom.machine.machine import COUNTED_IN_FLOPS, Machine, Operation
from meshloom.planner.algorithms import chosen_algorithms
from meshloom.report.terminal import short


def print_machine(machine: Machine, console: Console) -> None:
    """Two tables: seconds per operator at the smallest and the rate at the largest size measured; latency and
    rate per collective."""
    num_gib = f"{machine.memory_bytes / 2**30:.0f} GiB"
    threads = (
        f", {machine.threads} thread{'s' * (machine.threads > 1)} a rank" if machine.device == "cpu" else ""
    )
    num_cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    what = (
        f"{machine.model}, {num_cores}{threads}"
        if machine.device == "cpu"
        else f"{machine.devices} x {machine.model}"
    )
    _line(console, f"{machine.name}: {what}, {num_gib}, measured {age(time.time() - machine.measured_at)}")
    table = Table(box=None, pad_edge=False)
    table.add_column("operator", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for heading in ("forward", "rate", "backward", "rate", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for forward in machine.operations:
        if not forward.backward:
            backward = machine.operation(forward.kind, forward.dtype, backward=True)
            table.add_row(
                forward.kind, forward.dtype, duration(forward.points[0][1]), _rate(forward), duration(backward.points[0][1]), _rate(backward),
                f"{max(forward.spread, backward.spread):.0%}",
            )  # fmt: skip
    table.add_row(
        "call", "", duration(machine.call_seconds), "", duration(machine.backward_call_seconds), "", ""
    )
    console.print(table)
    if not machine.links:
        _line(console, "collectives: not measured, there was one rank")
        return
    _line(
        console,
        f"\ncollectives over {machine.transport}, in a group of some of the ranks that run; residual: of the line, latency + bytes / rate",
    )
    table = Table("collective", box=None, pad_edge=False)
    for heading in ("ranks", "of", "latency", "rate", "residual"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for link in machine.links:
        remark = ", ".join(
            ["between hosts"] * (link.place == "between")
            + ["in place"] * link.in_place
            + [link.algorithm] * bool(link.algorithm)
        )
        table.add_row(
            link.collective, str(link.ranks), str(link.among or link.ranks), duration(link.latency_seconds), f"{short(link.bytes_per_second)}B/s",
            f"{link.residual:.0%}", remark,
        )  # fmt: skip
    console.print(table)
    _line(console, "")
    how = (
        "measured"
        if any(link.algorithm for link in machine.links)
        else "measured; others: formulas, from the measured send"
    )
    _line(console, f"The fastest all-reduce (all_reduce: the transport's own; {how}):")
    for each in chosen_algorithms(machine):
        _line(console, f"  {each.choice.reason}")
    for crowd in machine.crowds:
        if crowd.ranks > 1:
            threads = f"{crowd.threads} thread{'s' * (crowd.threads > 1)}"
            _line(
                console,
                f"{crowd.ranks} busy ranks of {threads}: products take {crowd.compute:.2f} times as long as alone, memory {crowd.memory:.2f} times",
            )


def machine_records(machine: Machine) -> list[dict[str, Any]]:
    """The same as records: a machine, its operators, its links, how much its ranks slow each other down."""
    about = {
        "name": machine.name, "device": machine.device, "model": machine.model, "devices": machine.devices, "cores": machine.cores,
        "threads": machine.threads, "memory_bytes": machine.memory_bytes, "measured_at": machine.measured_at,
        "call_seconds": machine.call_seconds, "backward_call_seconds": machine.backward_call_seconds, "ranks": machine.ranks,
        "transport": machine.transport,
    }  # fmt: skip
    operators = [{"event": "operator", **vars(each), "unit": _unit(each)} for each in machine.operations]
    links = [{"event": "link", **vars(each)} for each in machine.links]
    crowds = [{"event": "crowd", **vars(each)} for each in machine.crowds]
    chosen = [
        {"event": "all_reduce", "ranks": each.ranks, "bytes": each.num_bytes, **vars(each.choice)}
        for each in chosen_algorithms(machine)
    ]
    return [{"event": "machine", **about}, *operators, *links, *crowds, *chosen]


def age(seconds: float) -> str:
    """How long ago.

    >>> age(3.0), age(600.0), age(7500.0), age(86400.0 * 3)
    ('just now', '10 minutes ago', '2 hours ago', '3 days ago')
    """
    for length, noun in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {noun}{'s' * (count > 1)} ago"
    return "just now"


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(0.0000021), duration(0.0137), duration(2.5), duration(90.0), duration(7200.0)
    ('2.1 us', '13.7 ms', '2.5 s', '1.5 min', '2 h')
    """
    for limit, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _rate(operation: Operation) -> str:
    return f"{short(operation.rate)}{_unit(operation)}/s"


def _unit(operation: Operation) -> str:
    return "FLOP" if operation.kind in COUNTED_IN_FLOPS else "B"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
