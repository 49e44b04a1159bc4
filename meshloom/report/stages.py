"""The stages of a plan as lines of text, and as a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshloom.core.mesh import AXES
from meshloom.core.units import format_bytes, format_count, format_number, format_seconds, plural
from meshloom.planner.memory.rank_memory import PHASES, RankMemory
from meshloom.planner.ranks import RankShare
from meshloom.planner.staged_plan import Better, StagePlan
from meshloom.tensor_parallel.search.costs import HELD_COPIES


def lines_of(found: StagePlan) -> list[str]:
    """A row for every stage, the balance, memory, traffic, the step, and better settings."""
    plan, stages, simulated = found.plan, found.choice.stages, found.simulated
    rows = [
        ["stage", "rank", "modules", "forward", "backward", "parameters", "activations", "in flight", "sends", "gets back"]
    ]  # fmt: skip
    for number, each in enumerate(stages):
        modules = each.module if each.module == each.last_module else f"{each.module} .. {each.last_module}"
        rows.append(
            [
                str(number), str(found.schedule.ranks[number]), modules, format_seconds(each.forward_seconds), format_seconds(each.backward_seconds),
                format_number(each.parameters), format_bytes(each.kept_bytes), f"x {found.in_flight[number]}",
                format_bytes(each.sent_bytes), format_bytes(each.returned_bytes),
            ]
        )  # fmt: skip
    slowest = max(range(len(stages)), key=lambda number: stages[number].seconds)
    fullest = max(range(plan.pp), key=lambda rank: found.choice.rank_bytes[rank])
    shares = ", ".join(f"{share:.0%}" for share in simulated.idle_shares)
    over_tp = ""
    if plan.tp > 1:
        over_tp = f"; numbers are of whole stages, before they are divided over tp={plan.tp}"
    sent = [
        f"stage {each.source} -> {each.destination} {format_bytes(each.forward_bytes)}, back {format_bytes(each.backward_bytes)}"
        for each in found.traffic
    ]
    return [
        f"{len(stages)} stages on pp={plan.pp} ranks, {plan.schedule}, {_microbatches(found.sizes)}; seconds: {found.source}{over_tp}",
        *_aligned(rows, words=2),
        f"balance: stage {slowest} is the slowest, {found.choice.imbalance:.1%} above the mean",
        f"memory: rank {fullest} holds most, {format_bytes(found.choice.rank_bytes[fullest])}: parameters with gradients and optimizer state "
        f"({HELD_COPIES} x) and the activations in flight",
        f"sent in a step: {'; '.join(sent) or 'nothing'}",
        f"a step takes {format_seconds(simulated.seconds)} (without exchange and update); ranks wait {simulated.idle_share:.1%} of it ({shares}), "
        f"and would wait {simulated.even_idle_share:.1%} if stages were equal",
        *(_offer(each, found) for each in found.better),
    ]


_OFFLOADED = (
    "offloaded: the optimizer's state, on disk on CPUs and in host memory on GPUs; peaks have what an update needs of it at one time",
)


def lines_of_ranks(shares: Sequence[RankShare], memories: Sequence[RankMemory], *, sent: bool) -> list[str]:
    """What each rank along pp holds by kind and in each phase, and hands over, a row each; of those along dp and
    tp the first. sent: whether what is sent along dp is known."""
    kinds = [
        "parameters",
        "gradients",
        "optimizer",
        "buffers",
        "activations",
        "temporaries",
        "batch",
        "exchange",
    ]
    kinds += ["offloaded"] if any(each.offloaded for each in memories) else []
    rows = [["rank along pp", *kinds, "sent along dp", "pp", "tp"]]
    peaks = [["rank along pp", *PHASES, "peak", "in"]]
    for each, memory in zip(shares, memories, strict=True):
        of_kinds = memory.kinds()
        sizes = [of_kinds[name.replace("activations", "kept")] for name in kinds]
        over = [format_bytes(each.num_bytes.get(axis, 0)) for axis in AXES]
        rows.append([str(each.pp), *map(format_bytes, sizes), over[0] if sent else "?", *over[1:]])
        phases = [format_bytes(memory.phases[phase]) for phase in PHASES]
        peaks.append([str(each.pp), *phases, format_bytes(memory.peak), memory.phase])
    return [
        "what a rank holds, the most of each kind, and hands over in a step:",
        *_aligned(rows, words=-1),
        *(_OFFLOADED if "offloaded" in kinds else ()),
        "its peak by phase (verification is a run of its own, meshloom verify, of which rank 0, on CPUs a process beside it, also runs one device's steps):",
        *_aligned(peaks, words=len(peaks[0]) - 1),
    ]


def stages_record(found: StagePlan) -> dict[str, Any]:
    """The same as plain numbers."""
    of_stages = zip(found.schedule.ranks, found.in_flight, found.choice.stages, strict=True)
    stages = [
        {"stage": number, "rank": rank, "in_flight": count, **asdict(each)}
        for number, (rank, count, each) in enumerate(of_stages)
    ]
    return {
        "plan": str(found.plan), "sizes": found.sizes, "source": found.source, "stages": stages, "imbalance": found.choice.imbalance,
        "rank_bytes": found.choice.rank_bytes, "traffic": [asdict(each) for each in found.traffic], "step_seconds": found.simulated.seconds,
        "idle_share": found.simulated.idle_share, "idle_shares": found.simulated.idle_shares, "even_idle_share": found.simulated.even_idle_share,
        "better": [asdict(each) for each in found.better],
    }  # fmt: skip


def _offer(each: Better, found: StagePlan) -> str:
    now, most = found.simulated, max(found.choice.rank_bytes)
    unknown = ""
    if each.setting.startswith("microbatches") and not found.measured:
        unknown = " (default rates know nothing of what small operators take at least)"
    return (
        f"{each.setting} would take {format_seconds(each.seconds)} ({each.gain:.0%} less), ranks waiting {each.idle_share:.1%} instead of {now.idle_share:.1%}, "
        f"and hold {format_bytes(each.rank_bytes)} instead of {format_bytes(most)}{unknown}"
    )


def _microbatches(sizes: Sequence[int]) -> str:
    """Their number and their samples.

    >>> _microbatches([4, 4]), _microbatches([4, 3, 3]), _microbatches([1])
    ('2 microbatches of 4 samples', '3 microbatches of 3 to 4 samples', '1 microbatch of 1 sample')
    """
    samples = f"{sizes[0]}" if min(sizes) == sizes[0] else f"{min(sizes)} to {sizes[0]}"
    return f"{format_count(len(sizes), 'microbatch')} of {samples} {plural('sample', sizes[0])}"


def _aligned(rows: Sequence[Sequence[str]], *, words: int) -> list[str]:
    """Numbers are aligned to the right, and the column number `words` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (
        [
            cell.ljust(width) if place == words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]
