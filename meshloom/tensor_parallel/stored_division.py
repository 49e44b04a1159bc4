"""How a program was divided in an earlier run, where the program, the plan and the rates are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshloom.program.cost.rates import Rates
from meshloom.program.store.stored import Stored
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.search.choose import (
    DivisionChoice,
    choice_of_numbers,
    digest_of_choice,
    numbers_of_choice,
)


def divided_before(
    stored: Stored | None,
    layout: Layout,
    num_ranks: int,
    rates: Rates,
    choose: Callable[[], DivisionChoice],
    *,
    rules: Mapping[str, str],
    placements: Mapping[str, str] | None,
    memory_bytes: float | None,
) -> DivisionChoice:
    """What `choose` gives, which is kept; rules, placements, memory_bytes: what it depends on besides."""
    if stored is None:
        return choose()
    parts = {
        "ranks": num_ranks,
        "rates": rates,
        "rules": sorted(rules.items()),
        "placements": placements,
        "memory": memory_bytes,
    }
    known = stored.choice("division", layout.program, parts)
    if known is not None:
        try:
            made = choice_of_numbers(layout, num_ranks, known["numbers"], placements=placements)
        except (IndexError, ValueError, KeyError, TypeError):  # not ours, however it came to have this name
            made = None
        if made is not None and digest_of_choice(made) == known.get("digest"):
            return replace(made, seconds=known["seconds"], is_proved=known["proved"])
    choice = choose()
    numbers = {
        "numbers": numbers_of_choice(choice),
        "digest": digest_of_choice(choice),
        "seconds": choice.seconds,
        "proved": choice.is_proved,
    }
    stored.keep_choice("division", layout.program, parts, numbers)
    return choice
