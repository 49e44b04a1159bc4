"""Where a program was cut in an earlier run, where the program, the plan and the rates are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from meshloom.pipeline.stages.cut import CutChoice
from meshloom.pipeline.stages.intervals import StageCost
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.store.stored import Stored


def cut_before(
    stored: Stored | None,
    program: Program,
    rates: Rates,
    choose: Callable[[], CutChoice],
    *,
    plan: Any,
    sizes: Sequence[int],
) -> CutChoice:
    """What `choose` gives, which is kept; plan, sizes: what it depends on besides."""
    if stored is None:
        return choose()
    parts = {"plan": str(plan), "rates": rates, "sizes": tuple(sizes)}
    known = stored.choice("cut", program, parts)
    if known is not None:
        try:
            numbers = dict(zip((node.name for node in program.nodes), known["stage_of"], strict=True))
            return CutChoice(
                stage_of=numbers,
                stages=tuple(StageCost(**each) for each in known["stages"]),
                rank_bytes=tuple(known["rank_bytes"]),
            )
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
