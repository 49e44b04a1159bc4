"""Costs of programs and choices of saved tensors, cached where program and rates are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
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
    stored.keep_choice("costs", program, {}, [_numbers(found[node.name]) for node in program.nodes])
    return found


_FIELDS = [field.name for field in fields(Cost) if field.name != "kept"]


def _numbers(cost: Cost) -> list[Any]:
    return [*(getattr(cost, name) for name in _FIELDS), [[each.memory, each.num_bytes] for each in cost.kept]]


def _cost(value: Sequence[Any]) -> Cost:
    *numbers, saved = value
    kept = tuple(SavedTensor(memory=memory, num_bytes=num_bytes) for memory, num_bytes in saved)
    return Cost(**dict(zip(_FIELDS, numbers, strict=True)), kept=kept)


def cached_saved_values(
    stored: ProgramCache | None, program: Program, rates: Rates, choose: Callable[[], list[str]], *, mode: str
) -> list[str]:
    """The cached result of `choose`: the names of the values saved for backward. mode: of recomputation."""
    if stored is None:
        return choose()
    parts = {"mode": mode, "rates": rates}
    known = stored.choice("kept", program, parts)
    names = {node.name for node in program.nodes}
    if isinstance(known, list) and all(str(each).removesuffix(":") in names for each in known):
        return known
    found = choose()
    stored.keep_choice("kept", program, parts, found)
    return found
