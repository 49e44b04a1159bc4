"""The registry of pipeline schedules, as plain values, and the checks of a plan's pipeline settings.

A schedule is a function in `pipeline/schedules/builders.py` and its entry here. The entry names the function,
since this room imports none of those above it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshloom.core.errors import PlanError
from meshloom.core.plan_text import check_known, text_of

RECOMPUTE = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """A schedule that a plan can name.

    builder: "module:function"; the function takes (ranks, microbatches, stages per rank, durations or None)
        and returns a `Schedule`.
    stages_per_rank: number of stages on each rank; the minimum, and the default, if `any_number` is set.
    split: whether backward is split into the gradients of inputs and those of weights.
    """

    builder: str
    stages_per_rank: int = 1
    any_number: bool = False
    split: bool = False


_BUILDERS = "meshloom.pipeline.schedules.builders"
SCHEDULES: Mapping[str, ScheduleEntry] = {
    "gpipe": ScheduleEntry(builder=f"{_BUILDERS}:gpipe"),
    "1f1b": ScheduleEntry(builder=f"{_BUILDERS}:one_forward_one_backward"),
    "interleaved": ScheduleEntry(builder=f"{_BUILDERS}:interleaved", stages_per_rank=2, any_number=True),
    "zb-h1": ScheduleEntry(builder=f"{_BUILDERS}:zero_bubble", split=True),
    "zb-v": ScheduleEntry(builder=f"{_BUILDERS}:zero_bubble_v", stages_per_rank=2, split=True),
    "found": ScheduleEntry(builder="meshloom.pipeline.schedules.found:found"),
}


class PipelineSettings(Protocol):
    """The settings of a plan that are checked here."""

    @property
    def pp(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def virtual_stages(self) -> int: ...
    @property
    def cuts(self) -> tuple[str, ...]: ...
    @property
    def recompute(self) -> str: ...
    @property
    def num_stages(self) -> int: ...


def check_pipeline(plan: PipelineSettings, defaults: Mapping[str, Any]) -> None:
    """Raise `PlanError` for pipeline settings that contradict each other. defaults: of every setting."""
    check_known("schedule", plan.schedule, SCHEDULES)
    check_known("recompute", plan.recompute, RECOMPUTE)
    cuts: tuple[Any, ...] = plan.cuts
    if not all(isinstance(each, str) and each and not set(each) & set(",+= ") for each in cuts):
        raise PlanError(f"cuts={plan.cuts!r} must be names of modules, like cuts=blocks.4+blocks.8.")
    if plan.pp == 1:
        for name in ("schedule", "virtual_stages", "cuts"):
            if (value := getattr(plan, name)) != defaults[name]:
                raise PlanError(
                    f"{name}={text_of(value)} is for a pipeline, and pp=1. Use pp=2 or more, or leave {name} out."
                )
    entry = SCHEDULES[plan.schedule]
    minimum = entry.stages_per_rank
    if plan.virtual_stages not in (0, minimum) and not (entry.any_number and plan.virtual_stages > minimum):
        allowed = f"{minimum} or more" if entry.any_number else minimum
        alternative = "" if entry.any_number else ", or use schedule=interleaved"
        raise PlanError(
            f"virtual_stages={plan.virtual_stages} does not go with schedule={plan.schedule}, which has {allowed} on each rank. "
            f"Leave virtual_stages out{alternative}."
        )
    if plan.cuts and len(plan.cuts) != plan.num_stages - 1:
        raise PlanError(
            f"cuts={text_of(plan.cuts)} makes {len(plan.cuts) + 1} stages, and pp={plan.pp} with schedule={plan.schedule} has {plan.num_stages}. "
            f"Name {plan.num_stages - 1} modules."
        )
