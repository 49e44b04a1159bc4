"""A description as a table of blocks, and as records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from meshloom.core.units import format_bytes, format_count, format_number, format_seconds
from meshloom.planner.blocks import Block, rows_of
from meshloom.planner.describe import Description
from meshloom.planner.memory.memory import Memory
from meshloom.report.machine_tables import age
from meshloom.report.terminal import print_line

NAMES = 3  # of a list of parameters


def print_description(description: Description, console: Console, depth: int | None = None) -> None:
    """The model, a row for every block, totals, and remarks. depth: levels of blocks."""
    print_line(console, _headline(description))
    columns = _columns(description)
    table = _table(description, depth, columns)
    for rank in (3, 2, 1):
        if Measurement.get(console, console.options.update_width(1000), table).maximum > console.width:
            table = _table(description, depth, [column for column in columns if column.dispensable < rank])
    console.print(table)
    for line in _remarks(description):
        print_line(console, line)


def description_records(description: Description, depth: int | None = None) -> list[dict[str, Any]]:
    """The model, a record for each row of the table, and the totals; bytes, FLOPs and seconds as plain
    numbers."""
    program, whole = description.program, description.whole
    about = {
        "model": whole.module,
        "batch_size": description.batch_size,
        "inputs": {
            each.name: {"shape": each.meta.shape, "dtype": _dtype(each.meta.dtype)} for each in program.inputs
        },
        "training": program.training,
        "unused": description.unused,
        "unpriced": description.unpriced,
        "opaque": description.opaque,
        "tied": description.tied,
        "machine": description.machine.name if description.machine else None,
    }
    records: list[dict[str, Any]] = [{"event": "model", **about}]
    records += [
        {"event": "block", "level": level, **_record(block)} for level, block in rows_of(whole, depth)
    ]
    records += [{"event": "total", **_record(whole)}]
    if memory := description.memory:
        records += [{"event": "memory", **_memory_record(memory), "phase": memory.phase}]
    return records


def _headline(description: Description) -> str:
    program, whole = description.program, description.whole
    inputs = ", ".join(f"{each.name} {each.meta}" if each.name else str(each.meta) for each in program.inputs)
    dtypes = ", ".join(dict.fromkeys(_dtype(each.meta.dtype) for each in program.parameters.values()))
    samples = format_count(description.batch_size, "sample")
    return f"{whole.module}: {whole.parameters:,} parameters ({format_bytes(whole.parameter_bytes)}, {dtypes}); {samples} ({inputs}); {whole.operators:,} operators"


@dataclass(frozen=True)
class _Column:
    heading: str
    text: Callable[[Block], str]
    right: bool = True
    dispensable: int = 0  # the highest go first where the terminal is narrow


def _table(description: Description, depth: int | None, columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True)
    for level, block in rows_of(description.whole, depth):
        name = f"{'  ' * (level - 1)}{block.name}{f'  x{block.count}' if block.count > 1 else ''}"
        table.add_row(*(column.text(replace(block, name=name)) for column in columns))
    table.add_row(*(column.text(replace(description.whole, name="total")) for column in columns))
    return table


def _columns(description: Description) -> list[_Column]:
    whole = description.whole
    work = lambda block: block.flops + block.backward_flops  # noqa: E731
    seconds = lambda block: block.seconds.total if block.seconds else 0.0  # noqa: E731
    columns = [
        _Column("block", lambda block: block.name, right=False),
        _Column("class", lambda block: block.module, right=False, dispensable=3),
        _Column("parameters", lambda block: format_number(block.parameters) if block.parameters else ""),
        _Column("", lambda block: _share(block.parameters, whole.parameters), dispensable=2),
        _Column("activations", lambda block: format_bytes(block.kept_bytes) if block.kept_bytes else ""),
        _Column("", lambda block: _share(block.kept_bytes, whole.kept_bytes), dispensable=2),
        _Column("FLOPs", lambda block: format_number(block.flops) if block.flops else ""),
        _Column(
            "backward",
            lambda block: format_number(block.backward_flops) if block.backward_flops else "",
            dispensable=1,
        ),
        _Column("", lambda block: _share(work(block), work(whole))),
    ]
    if description.machine:
        columns += [
            _Column("predicted", lambda block: format_seconds(seconds(block)) if seconds(block) else ""),
            _Column("", lambda block: _share(seconds(block), seconds(whole)), dispensable=1),
        ]
    return columns


def _share(part: float, whole: float) -> str:
    """In percent; more than nothing but less than one half is written as <1%.

    >>> _share(1, 3), _share(1, 1000), _share(0, 1)
    ('33%', '<1%', '')
    """
    if not part or not whole:
        return ""
    return f"{part / whole:.0%}" if part / whole >= 0.005 else "<1%"


_NAMES = {"kept": "activations", "copied": "a copy for checkpoints in the background"}


def _remarks(description: Description) -> list[str]:
    whole, machine, memory = description.whole, description.machine, description.memory
    lines = [
        "activations: what is kept from forward to backward, of this batch in one chunk; each memory once, at the first block that keeps it"
    ]
    if memory:
        of_kinds = ", ".join(
            f"{_NAMES.get(name, name)} {format_bytes(num_bytes)}"
            for name, num_bytes in _memory_record(memory).items()
            if num_bytes and name != "peak"
        )
        lines.append(
            f"memory of a step on one device: {format_bytes(memory.peak)} at its peak, in the {memory.phase}: {of_kinds}"
        )
        if memory.guessed:
            lines.append(
                f"state of {_some(memory.guessed, ', ')}: not known, as meshloom knows torch's optimizers; taken as twice the bytes of its parameters"
            )
    else:
        lines.append(f"memory of a step is not known: {description.no_memory}")
    if machine and whole.seconds:
        lines.append(
            f"predicted: {format_seconds(whole.seconds.forward)} forward, {format_seconds(whole.seconds.backward)} backward on one rank of {machine.name} "
            f"({machine.device}), without optimizer and exchange; calibrated {age(time.time() - machine.measured_at)}"
        )
    else:
        lines.append(
            "predicted seconds: this machine is not measured yet; meshloom calibrate does that in half a minute"
        )
    lines += [f"tied: {_some(names, ' = ')}" for names in description.tied[:NAMES]]
    if len(description.tied) > NAMES:
        lines.append(f"tied: {len(description.tied) - NAMES} more")
    lines += description.opaque
    if description.unpriced:
        lines.append(f"FLOPs not known, counted as 0: {', '.join(description.unpriced)}")
    if description.unused:
        lines.append(f"not used by the loss: {_some(description.unused, ', ')}")
    return lines


def _some(names: Sequence[str], between: str) -> str:
    """The first few, and how many more.

    >>> _some("abcde", ", "), _some("ab", " = ")
    ('a, b, c and 2 more', 'a = b')
    """
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{between.join(names[:NAMES])}{more}"


def _record(block: Block) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    if block.seconds:
        seconds = {"forward_seconds": block.seconds.forward, "backward_seconds": block.seconds.backward}
    return {
        "block": block.path, "class": block.module, "count": block.count, "parameters": block.parameters, "parameter_bytes": block.parameter_bytes,
        "kept_bytes": block.kept_bytes, "flops": block.flops, "backward_flops": block.backward_flops, "operators": block.operators, **seconds,
    }  # fmt: skip


def _memory_record(memory: Memory) -> dict[str, int]:
    """Bytes by kind; each is the largest of its kind, so they may add up to more than the peak."""
    kinds = (
        "parameters",
        "gradients",
        "optimizer",
        "buffers",
        "batch",
        "kept",
        "temporaries",
        "copied",
        "peak",
    )
    return {kind: int(getattr(memory, kind)) for kind in kinds}


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
