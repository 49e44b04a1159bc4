"""A machine's measurements as tables: operators by kind and size, collectives by ranks, and its fastest
all-reduce."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from meshloom.core.units import format_bytes, format_count, format_number, format_seconds
from meshloom.machine.machine import COUNTED_IN_FLOPS, Machine, Operation
from meshloom.planner.algorithms import faster_all_reduces
from meshloom.report.terminal import print_line


def print_machine(machine: Machine, console: Console) -> None:
    """Two tables: seconds per operator at the smallest and the rate at the largest measured size; latency and
    rate per collective."""
    size = format_bytes(machine.memory_bytes)
    threads = f", {format_count(machine.threads, 'thread')} a rank" if machine.device == "cpu" else ""
    num_cores = format_count(machine.cores, "core")
    on_cpu = machine.device == "cpu"
    what = f"{machine.model}, {num_cores}{threads}" if on_cpu else f"{machine.devices} x {machine.model}"
    print_line(console, f"{machine.name}: {what}, {size}, measured {age(time.time() - machine.measured_at)}")
    table = Table(box=None, pad_edge=False)
    table.add_column("operator", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for heading in ("forward", "rate", "backward", "rate", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for forward in machine.operations:
        if not forward.backward:
            backward = machine.operation(forward.kind, forward.dtype, backward=True)
            table.add_row(
                forward.kind, forward.dtype, format_seconds(forward.points[0][1]), _rate(forward), format_seconds(backward.points[0][1]), _rate(backward),
                f"{max(forward.spread, backward.spread):.0%}",
            )  # fmt: skip
    call, backward_call = map(format_seconds, (machine.call_seconds, machine.backward_call_seconds))
    table.add_row("call", "", call, "", backward_call, "", "")
    console.print(table)
    if machine.disk_bytes_per_second:
        rate = f"{format_number(machine.disk_bytes_per_second)}B/s"
        print_line(console, f"disk for temporary files: {rate}, reading as much as writing")
    if not machine.links:
        print_line(console, "collectives: not measured, there was one rank")
        return
    print_line(
        console,
        f"\ncollectives over {machine.transport}, in a group of some of the ranks that run; residual: of the line, latency + bytes / rate",
    )
    table = Table("collective", box=None, pad_edge=False)
    for heading in ("ranks", "of", "latency", "rate", "residual"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for link in machine.links:
        facts = ["between hosts"] * (link.place == "between") + ["in place"] * link.in_place
        facts += [link.algorithm] if link.algorithm else []
        table.add_row(
            link.collective, str(link.ranks), str(link.among or link.ranks), format_seconds(link.latency_seconds), f"{format_number(link.bytes_per_second)}B/s",
            f"{link.residual:.0%}", ", ".join(facts),
        )  # fmt: skip
    console.print(table)
    print_line(console)
    how = "measured"
    if not any(link.algorithm for link in machine.links):
        how += "; ring: by its formula, from the measured send"
    print_line(console, f"The faster all-reduce (all_reduce: the transport's own; {how}):")
    for each in faster_all_reduces(machine):
        print_line(console, f"  {each.reason}")


def machine_records(machine: Machine) -> list[dict[str, Any]]:
    """The same as records: a machine, its operators, its links, its faster all-reduces."""
    about = {
        "name": machine.name, "device": machine.device, "model": machine.model, "devices": machine.devices, "cores": machine.cores,
        "threads": machine.threads, "memory_bytes": machine.memory_bytes, "measured_at": machine.measured_at,
        "call_seconds": machine.call_seconds, "backward_call_seconds": machine.backward_call_seconds, "ranks": machine.ranks,
        "transport": machine.transport,
    }  # fmt: skip
    operators = [{"event": "operator", **vars(each), "unit": _unit(each)} for each in machine.operations]
    links = [{"event": "link", **vars(each)} for each in machine.links]
    faster = [
        {
            "event": "all_reduce", "ranks": each.ranks, "bytes": each.num_bytes, "algorithm": each.algorithm, "seconds": each.seconds,
            "reason": each.reason,
        }
        for each in faster_all_reduces(machine)
    ]  # fmt: skip
    return [{"event": "machine", **about}, *operators, *links, *faster]


def age(seconds: float) -> str:
    """How long ago.

    >>> age(3.0), age(600.0), age(7500.0), age(86400.0 * 3)
    ('just now', '10 minutes ago', '2 hours ago', '3 days ago')
    """
    for length, noun in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            return f"{format_count(int(seconds // length), noun)} ago"
    return "just now"


def _rate(operation: Operation) -> str:
    return f"{format_number(operation.rate)}{_unit(operation)}/s"


def _unit(operation: Operation) -> str:
    return "FLOP" if operation.kind in COUNTED_IN_FLOPS else "B"
