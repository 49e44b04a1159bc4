"""What a program costs and how it was divided and cut, as an earlier run found it, where the program, the plan and the rates are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from meshloom.pipeline.stages.cut import CutChoice
from meshloom.pipeline.stages.intervals import StageCost
from meshloom.program.cost.cost import Cost, Kept
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.store.stored import Stored
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.search.choose import Choice, choice_of_numbers, digest_of_choice, numbers_of_choice


def costs_before(stored: Stored | None, program: Program, price: Callable[[Program], Mapping[str, Cost]]) -> Mapping[str, Cost]:
    """What `price` gives for a program, which is kept. Of a node stand its numbers, in the order of `Cost`, and what it keeps."""
    if stored is None:
        return price(program)
    known = stored.choice("costs", program, {})
    try:
        return {node.name: _cost(each) for node, each in zip(program.nodes, known or (), strict=True)}
    except (ValueError, TypeError):  # none is kept, or it is not ours
        pass
    found = price(program)
    stored.keep_choice(
        "costs",
        program,
        {},
        [[*_numbers(found[node.name]), [[each.memory, each.num_bytes] for each in found[node.name].kept]] for node in program.nodes],
    )
    return found


def _numbers(cost: Cost) -> tuple[int, ...]:
    return (
        cost.flops, cost.backward_flops, cost.read_bytes, cost.written_bytes, cost.backward_read_bytes, cost.backward_written_bytes,
    )  # fmt: skip


def _cost(value: Sequence[Any]) -> Cost:
    flops, backward_flops, read, written, backward_read, backward_written, kept = value
    return Cost(
        flops=flops, backward_flops=backward_flops, read_bytes=read, written_bytes=written, backward_read_bytes=backward_read,
        backward_written_bytes=backward_written, kept=tuple(Kept(memory=memory, num_bytes=num_bytes) for memory, num_bytes in kept),
    )  # fmt: skip


def divided_before(
    stored: Stored | None,
    layout: Layout,
    num_ranks: int,
    rates: Rates,
    choose: Callable[[], Choice],
    *,
    rules: Mapping[str, str],
    placements: Mapping[str, str] | None,
    memory_bytes: float | None,
) -> Choice:
    """What `choose` gives, which is kept; rules, placements, memory_bytes: what it depends on besides."""
    if stored is None:
        return choose()
    parts = {"ranks": num_ranks, "rates": rates, "rules": sorted(rules.items()), "placements": placements, "memory": memory_bytes}
    known = stored.choice("division", layout.program, parts)
    if known is not None:
        try:
            made = choice_of_numbers(layout, num_ranks, known["numbers"], placements=placements)
        except (IndexError, ValueError, KeyError, TypeError):  # not ours, however it came to have this name
            made = None
        if made is not None and digest_of_choice(made) == known.get("digest"):
            return replace(made, seconds=known["seconds"], is_proved=known["proved"])
    choice = choose()
    numbers = {"numbers": numbers_of_choice(choice), "digest": digest_of_choice(choice), "seconds": choice.seconds, "proved": choice.is_proved}
    stored.keep_choice("division", layout.program, parts, numbers)
    return choice


def cut_before(
    stored: Stored | None, program: Program, rates: Rates, choose: Callable[[], CutChoice], *, plan: Any, sizes: Sequence[int]
) -> CutChoice:
    """What `choose` gives, which is kept; plan, sizes: what it depends on besides."""
    if stored is None:
        return choose()
    parts = {"plan": str(plan), "rates": rates, "sizes": tuple(sizes)}
    known = stored.choice("cut", program, parts)
    if known is not None:
        try:
            numbers = dict(zip((node.name for node in program.nodes), known["stage_of"], strict=True))
            return CutChoice(stage_of=numbers, stages=tuple(StageCost(**each) for each in known["stages"]), rank_bytes=tuple(known["rank_bytes"]))
        except (ValueError, KeyError, TypeError):
            pass
    choice = choose()
    found = {
        "stage_of": [choice.stage_of[node.name] for node in program.nodes],
        "stages": [asdict(each) for each in choice.stages],
        "rank_bytes": choice.rank_bytes,
    }
    stored.keep_choice("cut", program, parts, found)
    return choice


def kept_before(stored: Stored | None, program: Program, rates: Rates, choose: Callable[[], list[str]], *, mode: str) -> list[str]:
    """The same of the values that are kept for the backward. mode: of recomputation."""
    if stored is None:
        return choose()
    parts = {"mode": mode, "rates": rates}
    known = stored.choice("kept", program, parts)
    names = {value for node in program.nodes for value in (node.name,)}
    if isinstance(known, list) and all(isinstance(each, str) and each.removesuffix(":") in names for each in known):
        return known
    found = choose()
    stored.keep_choice("kept", program, parts, found)
    return found
