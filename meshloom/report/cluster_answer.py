"""The answer of `meshloom plan --cluster` as text and as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from meshloom.core.units import format_bytes, format_count, format_seconds
from meshloom.planner.on_clusters.answer import ClusterAnswer, limits, why_not
from meshloom.planner.on_clusters.step import ClusterStep
from meshloom.report.terminal import print_line

SHOWN = 8


def print_answer(found: ClusterAnswer, console: Console) -> None:
    """The best plans, their breakdown, what decided, and how far it scales."""
    if found.best:
        _print_steps(found, found.searched.steps[:SHOWN], console)
    for line in _lines(found):
        print_line(console, line)


def print_compared(found: ClusterAnswer, steps: Sequence[ClusterStep], console: Console) -> None:
    """Some plans side by side."""
    _print_steps(found, steps, console)
    best = min(steps, key=lambda each: (not found.fits(each), each.seconds))
    for each in steps:
        said = limits(each, found.room) if each is best else why_not(each, best, found.room)
        print_line(console, f"{each.plan}: {said}.")


def _print_steps(found: ClusterAnswer, steps: Sequence[ClusterStep], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    parts = [name for name in steps[0].breakdown if any(each.breakdown[name] > 0 for each in steps)]
    for heading in ("step", *parts, "memory", "GPU-hours", "dollars"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in steps:
        table.add_row(
            str(each.plan), format_seconds(each.seconds), *(f"{each.breakdown[name] / each.seconds:.0%}" for name in parts),
            format_bytes(each.peak) + ("" if found.fits(each) else " !"), f"{found.gpu_hours(each):,.1f}", f"{found.dollars(each):,.0f}",
        )  # fmt: skip
    console.print(table)


def _lines(found: ClusterAnswer) -> Iterator[str]:
    cluster = found.cluster
    where = f"{format_count(cluster.gpus, 'GPU')} of {cluster.name}"
    yield ""
    if found.best is None:
        nearest = found.searched.fits_not[0] if found.searched.fits_not else None
        yield f"No plan fits on {where}: a rank has {format_bytes(found.room)} for tensors."
        if nearest:
            yield f"  {nearest.plan} comes nearest: {format_bytes(nearest.peak)}, {_kinds(nearest)}."
    else:
        yield f"{found.best.plan} on {where}: {format_seconds(found.best.seconds)} a step ({_interval(found, found.best)}); {limits(found.best, found.room)}."
        yield f"  it holds {_kinds(found.best)}"
        yield from (f"  {each.plan}: {why_not(each, found.best, found.room)}." for each in found.rivals)
    if found.scaled and any(each.step for each in found.scaled):
        yield "\nGPUs    step      of linear  plan"
        for each in found.scaled:
            said = (
                f"{format_seconds(each.step.seconds):9} {each.efficiency:9.0%}  {each.step.plan}"
                if each.step
                else "nothing fits, or divides"
            )
            yield f"{each.gpus:<7} {said}"
    searched = found.searched
    yield f"\n{searched.priced} plans were priced, {len(searched.fits_not)} of them do not fit."
    yield from (
        f"not priced, {count} plans: {why}"
        for why, count in sorted(searched.refused.items(), key=lambda each: -each[1])
    )
    yield "seconds: of the step alone, by the constants of the cluster's file; memory: of tensors, without what the allocator rounds up"


def _interval(found: ClusterAnswer, step: ClusterStep) -> str:
    low, high = found.interval(step)
    return f"{format_seconds(low)} to {format_seconds(high)} in nine of ten published runs"


def _kinds(step: ClusterStep) -> str:
    return ", ".join(
        f"{format_bytes(count)} {kind}"
        for kind, count in sorted(step.memory.items(), key=lambda each: -each[1])
        if count
    )


def answer_records(found: ClusterAnswer, steps: Sequence[ClusterStep]) -> Iterator[dict[str, Any]]:
    """A record a plan."""
    for each in steps:
        yield {
            "event": "plan", "plan": str(each.plan), "cluster": found.cluster.name, "gpus": each.plan.mesh.size, "step_seconds": each.seconds,
            "step_seconds_interval": found.interval(each),
            "peak_bytes": each.peak, "fits": found.fits(each), "bytes": each.sent, "breakdown": each.breakdown, "memory": each.memory,
            "gpu_hours": found.gpu_hours(each), "dollars": found.dollars(each), "simulated": each.simulated,
        }  # fmt: skip
