"""Costs of programs and choices of saved tensors, cached where program and rates are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.store.program_cache import ProgramCache


def cached_costs(
    stored: ProgramCache | None, program: Program, price: Callable[[Program], Mapping[str, Cost]]
) -> Mapping[str, Cost]:
    """The cached result of `price`. The file has each node's numbers of `Cost`, then its saved tensors."""
    if stored is None:
        return price(program)
    known = stored.choice("costs", program, {})
    try:
        return {node.name: _cost(each) for node, each in zip(program.nodes, known or (), strict=True)}
    except (ValueError, TypeError):  # nothing cached, or not written by us
        pass
    found = price(program)
    stored.keep_choice(
        "costs",
        program,
        {},
        [
            [*_numbers(found[node.name]), [[each.memory, each.num_bytes] for each in found[node.name].kept]]
            for node in program.nodes
        ],
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
        backward_written_bytes=backward_written, kept=tuple(SavedTensor(memory=memory, num_bytes=num_bytes) for memory, num_bytes in kept),
    )  # fmt: skip


def cached_saved_values(
    stored: ProgramCache | None, program: Program, rates: Rates, choose: Callable[[], list[str]], *, mode: str
) -> list[str]:
    """The cached result of `choose`: the names of the values saved for backward. mode: of recomputation."""
    if stored is None:
        return choose()
    parts = {"mode": mode, "rates": rates}
    known = stored.choice("kept", program, parts)
    names = {value for node in program.nodes for value in (node.name,)}
    if isinstance(known, list) and all(
        isinstance(each, str) and each.removesuffix(":") in names for each in known
    ):
        return known
    found = choose()
    stored.keep_choice("kept", program, parts, found)
    return found
