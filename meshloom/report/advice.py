"""Advice as text and as records: a table of plans, the recommended one with its reasons, and the speedup of
more ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from meshloom.core.units import format_bytes, format_seconds
from meshloom.planner.advise import Advice
from meshloom.planner.memory.rank_memory import HeldBytes
from meshloom.planner.pricing import Option
from meshloom.report.terminal import print_line


def print_advice(advice: Advice, console: Console) -> None:
    """The plans, fastest first, those that do not fit last; the reason; Amdahl's bound; the refused plans."""
    table = Table(box=None, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    was_tried = any(each.measured_seconds is not None for each in advice.options)
    for heading in ("step", *(["measured"] if was_tried else []), "memory", "sent a step", "idle"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for each in advice.options:
        sent = ", ".join(f"{axis} {format_bytes(count)}" for axis, count in each.num_bytes.items())
        measured = format_seconds(each.measured_seconds) if each.measured_seconds is not None else ""
        table.add_row(
            str(each.plan), format_seconds(each.price.seconds), *([measured] if was_tried else []), format_bytes(each.memory_bytes), sent or "nothing",
            f"{each.price.idle_share:.0%}", _mark(advice, each),
        )  # fmt: skip
    console.print(table)
    for line in _lines(advice, was_tried):
        print_line(console, line)


def _lines(advice: Advice, was_tried: bool) -> Iterator[str]:
    yield ""
    yield advice.reason
    if len(advice.options) == 1:
        yield f"{advice.options[0].plan}: {advice.options[0].why}."
    else:
        yield from (f"  {each.plan}: {each.why}" for each in advice.options)
    if advice.recommended and advice.recommended.held:
        yield f"{advice.recommended.plan}: {_of_fullest(advice.recommended.held)}"
    if advice.exchange:
        yield advice.exchange
    if advice.disk:
        yield advice.disk
    if advice.work:
        share = advice.work.parallel_share
        yield f"\nAmdahl: {share:.1%} of a step is forwards and backwards, which replicas divide; the rest every rank does."
        yield "ranks  bound  with communication  predicted"
        for each in advice.speedups:
            yield f"{each.num_ranks:5}  {each.bound:5.2f}  {each.with_communication:18.2f}  {each.predicted:9.2f}"
        yield "bound: 1 / (1 - f + f/n), every rank with cores of its own; predicted: with cores shared as they are on this machine"
    yield from (f"not possible: {plan}: {why}" for plan, why in advice.refused.items())
    if was_tried:
        yield "measured: a step, median of some on this machine; the recommended plan is of those that were tried"
    yield "seconds: without reading data"


def advice_records(advice: Advice) -> list[dict[str, Any]]:
    """Whether one device suffices, a record for each plan, the refused plans, the speedups, and the
    recommendation."""
    peak, limit = advice.one_device.peak, advice.one_device_limit
    one = {"event": "one_device", "memory_bytes": peak, "limit_bytes": limit, "fits": advice.fits_on_one}
    options = [{"event": "plan", **option_record(each)} for each in advice.options]
    refused = [{"event": "refused", "plan": plan, "why": why} for plan, why in advice.refused.items()]
    speedups = [{"event": "speedup", **vars(each)} for each in advice.speedups]
    best = advice.recommended
    chosen = {"plan": str(best.plan) if best else None, "why": advice.reason, "exchange": advice.exchange}
    return [one, *options, *refused, *speedups, {"event": "recommended", **chosen}]


def option_record(option: Option) -> dict[str, Any]:
    """One plan: bytes by axis are those that rank 0 hands over in a step; `measured_seconds` is of a plan
    that was tried."""
    price = option.price
    return {
        "plan": str(option.plan), "step_seconds": price.seconds, "memory_bytes": option.memory_bytes, "bytes": dict(option.num_bytes),
        "ranks": [asdict(each) for each in option.held],
        "measured_seconds": option.measured_seconds, "idle_share": price.idle_share, "why": option.why, "fits": option.fits, "limit_bytes": option.limit_bytes,
        "seconds": {
            "chunks": price.chunks, "exchange": price.exchange, "update": price.update, "other": price.other, "talking": dict(price.communication),
            "disk": price.disk,
        },
    }  # fmt: skip


def _mark(advice: Advice, option: Option) -> str:
    if not option.fits:
        return "does not fit"
    return "<- take this" if advice.recommended and option.plan == advice.recommended.plan else ""


def _of_fullest(held: Sequence[HeldBytes]) -> str:
    """What the rank that holds most held when it was rehearsed, by kind."""
    rank = max(range(len(held)), key=lambda each: held[each].total)
    mine = held[rank]
    kinds = {
        "parameters": mine.parameters, "gradients": mine.gradients, "optimizer": mine.optimizer, "buffers": mine.buffers, "activations": mine.kept,
        "exchange": mine.on_the_way + mine.full, "offloaded": mine.offloaded,
    }  # fmt: skip
    return f"rank {rank} holds most: {', '.join(f'{name} {format_bytes(size)}' for name, size in kinds.items() if size)}"
