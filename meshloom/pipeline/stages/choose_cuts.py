"""Chooses the stage boundaries ("cuts") of a program so that the slowest stage is as fast as possible.

Every stage is an interval of the operators in eager's order, so no value flows back. A stage takes the
seconds of its operators, forward and backward, and of communication at its two ends (`intervals.py`). The
best boundaries are found by dynamic programming (`dynamic_program.py`), unless the user names the modules
that begin stages.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes
from meshloom.pipeline.stages.dynamic_program import Limits, best_cuts, rank_bytes, refined
from meshloom.pipeline.stages.intervals import Intervals, StageCost
from meshloom.pipeline.stages.stages import updating
from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.cost.program_seconds import Seconds, work_of
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.lines import describe_line
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.search.costs import HELD_COPIES

UNEVEN = 1.25
Holders = Mapping[str, Collection[int]]


@dataclass(frozen=True, kw_only=True)
class CutChoice:
    """stage_of: node -> stage. stages: the cost of each. rank_bytes: the most that each rank holds of
    parameters, gradients, optimizer state and activations."""

    stage_of: Mapping[str, int]
    stages: tuple[StageCost, ...]
    rank_bytes: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """How much slower the slowest stage is than the mean: 0.1 is 10 %."""
        seconds = [each.seconds for each in self.stages]
        mean = sum(seconds) / len(seconds)
        return max(seconds) / mean - 1 if mean else 0.0


def choose_cuts(
    program: Program,
    costs: Mapping[str, Cost],
    num_stages: int,
    rates: Rates | None = None,
    *,
    cuts: Sequence[str] = (),
    memory_bytes: float | None = None,
    in_flight: Sequence[Sequence[int]] = (),
    ranks: Sequence[int] = (),
    holders: Holders | None = None,
    work: Mapping[str, Seconds] | None = None,
    kept: Mapping[str, Sequence[SavedTensor]] | None = None,
    step_seconds: Callable[[Sequence[StageCost]], float] | None = None,
    line: Intervals | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> CutChoice:
    """The stage of every node.

    cuts: modules that begin the stages after the first, instead of a choice.
    memory_bytes: the most that a rank may hold: its parameters with gradients and optimizer state, plus the
        activations in flight. Exact if each rank has one stage; otherwise cuts that fit may be missed.
    in_flight: [moment][stage], microbatches whose activations are held (`held_by_stage`); default: one each.
    ranks: stage -> its rank; default: a rank for each.
    holders: parameter or buffer -> the stages that hold it already; all of its users must be in these, or in
        others of their ranks (`where_used`).
    work, kept: node -> its seconds, and what autograd saves for it; default: those of `costs`, at `rates`.
    step_seconds: seconds of a step with these stages. If given, cuts near the best are tried too, and the
        shortest step wins; no stage becomes `UNEVEN` times as slow as the slowest was.
    line: the program's `line_of`, if known; it then determines `work` and `kept`.
    told: as of `best_cuts`, then as of `refined`.
    Raises `PlanError` if there are too few places to cut, a module does not exist, or no cuts are within
    limits.
    """
    rates = rates or Rates()
    if line is None:
        work = work if work is not None else work_of(program, costs, rates)
        kept = kept if kept is not None else {name: cost.kept for name, cost in costs.items()}
        line = line_of(program, work, kept, rates)
    ranks = tuple(ranks) or tuple(range(num_stages))
    holders = where_used(program, holders or {}, ranks)
    limits = Limits(
        ranks=ranks,
        memory_bytes=math.inf if memory_bytes is None else memory_bytes,
        in_flight=tuple(in_flight) or ((1,) * num_stages,),
        forbidden=_forbidden(line, holders, num_stages),
    )
    if cuts:
        chosen = _given(line, cuts, limits, holders)
    else:
        limits, chosen = _best(line, limits, holders, told)
    if step_seconds is not None and not cuts:
        # Stages are meant to split parameters and work even if a model is so small that communication takes
        # longer than all computation.
        longest = UNEVEN * max(each.seconds for each in _stages(line, chosen))

        def price(tried: Sequence[int]) -> float:
            stages = _stages(line, tried)
            return step_seconds(stages) if max(each.seconds for each in stages) <= longest else math.inf

        chosen = refined(line, limits, chosen, price, told)
    return CutChoice(
        stage_of={
            node.name: stage
            for stage, (start, end) in enumerate(line.bounds(chosen))
            for node in program.nodes[start:end]
        },
        stages=tuple(_stages(line, chosen)),
        rank_bytes=tuple(map(round, rank_bytes(line, limits, chosen))),
    )


def line_of(
    program: Program, work: Mapping[str, Seconds], kept: Mapping[str, Sequence[SavedTensor]], rates: Rates, pinned: Collection[str] = (),
) -> Intervals:  # fmt: skip
    """The cost of a program's operators as stages, between any two places."""
    speed = rates.send.bytes_per_second if rates.send else rates.link_bytes_per_second
    return Intervals(
        program, work, kept, link_bytes_per_second=speed, state_factor=HELD_COPIES, pinned=pinned
    )


def where_used(program: Program, holders: Holders, ranks: Sequence[int]) -> dict[str, list[int]]:
    """Parameter or buffer -> the stages that may use it: those that hold it, and others of their ranks.

    A buffer that changes stays in its stages, each of which merges what its chunks write.
    """
    changing = updating(program)

    def may(name: str, where: Collection[int], stage: int) -> bool:
        return stage in where or (name not in changing and ranks[stage] in {ranks[home] for home in where})

    return {
        name: [stage for stage in range(len(ranks)) if may(name, where, stage)]
        for name, where in holders.items()
    }


def _stages(line: Intervals, cuts: Sequence[int]) -> list[StageCost]:
    return [line.stage(start, end) for start, end in line.bounds(cuts)]


def _forbidden(line: Intervals, holders: Holders, num_stages: int) -> dict[int, list[int]]:
    """Stage -> operators that use parameters or buffers of other stages."""
    found: dict[int, list[int]] = {}
    for name, uses in line.uses.items():
        if name in holders:
            for stage in set(range(num_stages)) - set(holders[name]):
                found.setdefault(stage, []).extend(uses)
    return found


def _best(
    line: Intervals, limits: Limits, holders: Holders, told: Callable[[int, int], None]
) -> tuple[Limits, list[int]]:
    """The cuts, and the limits that they keep: all stages have parameters if they can."""
    count = limits.num_stages
    if len(line.places) < count - 1:
        raise PlanError(
            f"The model can be cut at {len(line.places)} places, and {count} stages need {count - 1}. Use at most {len(line.places) + 1} stages."
        )
    all_hold = replace(limits, all_hold=True)
    if (found := best_cuts(line, all_hold, told)) is not None:
        return all_hold, found
    found = best_cuts(line, limits, told)
    if found is None:
        _check_holders(line, holders, count)
        everything = line.stage(0, line.num_nodes)
        raise PlanError(
            f"No cut into {count} stages {'was found that fits' if limits.is_shared else 'fits'} into {format_bytes(limits.memory_bytes)} a rank: "
            f"parameters with their gradients and optimizer state are {format_bytes(everything.state_bytes)}, and the activations of one microbatch "
            f"{format_bytes(everything.kept_bytes)}. Use more stages, more microbatches, or a schedule that holds fewer of them."
        )
    return limits, found


def _check_holders(line: Intervals, holders: Holders, num_stages: int) -> None:
    """Raises `PlanError` with the first operator that no stage can contain: its parameters are in an
    earlier stage than its operands."""
    places = {0, *line.places}
    names: dict[int, list[str]] = {}
    for name, uses in line.uses.items():
        for use in uses if name in holders else ():
            names.setdefault(use, []).append(name)
    reached, before = {0}, ""
    for number, node in enumerate(line.program.nodes):
        if number in places:
            reached |= {stage + 1 for stage in reached if number and stage + 1 < num_stages}
        for name in names.get(number, ()):
            if not reached & set(holders[name]):
                raise PlanError(
                    f"{node.operator} at {describe_line(node.line)} uses {name}, which belongs to {_stages_named(holders[name])} since the first program was "
                    f"cut{f', but runs after {before}' if before else ''}: it can only be in {_stages_named(reached)}. "
                    "Let parameters be used in the same order for every batch, or cut elsewhere (cuts=...)."
                )
            reached &= set(holders[name])
            before = f"what uses {name} of {_stages_named(holders[name])}"
    if num_stages - 1 not in reached:
        raise PlanError(
            f"After {before or 'its last operator'}, this program is in {_stages_named(reached)} of {num_stages}, so the last has nothing to compute. "
            "Cut elsewhere (cuts=...)."
        )


def _stages_named(stages: Collection[int]) -> str:
    ordered = sorted(stages)
    return f"stage {ordered[0]}" if len(ordered) == 1 else f"stages {', '.join(map(str, ordered))}"


def _hint(cut: str, paths: Collection[str]) -> str:
    """Modules that the user may have meant: with similar names, else those next to it."""
    prefixes = {each for path in paths for each in accumulate(path.split("."), "{}.{}".format)}
    known = sorted(prefixes - {""})
    near = difflib.get_close_matches(cut, known, n=1, cutoff=0.8)
    if near:
        return f"Did you mean {near[0]}?"
    beside = [each for each in known if each.rpartition(".")[0] == cut.rpartition(".")[0]]
    beside = beside or [each for each in known if "." not in each]
    return f"There are {', '.join(beside[:8])}."


def _given(line: Intervals, cuts: Sequence[str], limits: Limits, holders: Holders) -> list[int]:
    nodes = line.program.nodes
    if len(cuts) != limits.num_stages - 1:
        raise PlanError(
            f"cuts={'+'.join(cuts)} makes {len(cuts) + 1} stages, and the plan has {limits.num_stages}. Name {limits.num_stages - 1}."
        )
    ends: list[int] = []
    for cut in cuts:
        numbers = (number for number, node in enumerate(nodes) if _is_in(node.path, cut))
        found = next(numbers, None)
        if found is None:
            raise PlanError(
                f"cuts={cut}: no module of that name runs in the forward. {_hint(cut, {node.path for node in nodes})}"
            )
        if ends and found <= ends[-1]:
            raise PlanError(
                f"cuts={'+'.join(cuts)}: {cut} runs before {cuts[len(ends) - 1]}. Name them in the order of the forward."
            )
        if found not in line.places:
            if found < min(line.places, default=0):
                raise PlanError(f"cuts={cut}: the model cannot be cut before {cut}, which runs first.")
            raise PlanError(
                f"cuts={cut}: the model cannot be cut before {cut}: several tensors in one value, or a buffer that is updated, would be on both sides."
            )
        ends.append(found)
    for stage, (start, end) in enumerate(line.bounds(ends)):
        for name, uses in line.uses.items():
            inside = [use for use in uses if start <= use < end]
            if inside and stage not in holders.get(name, (stage,)):
                node = nodes[inside[0]]
                raise PlanError(
                    f"cuts={'+'.join(cuts)} puts {node.operator} at {describe_line(node.line)} into stage {stage}, and {name}, which it uses, "
                    f"belongs to {_stages_named(holders[name])} since the first program was cut."
                )
    return ends


def _is_in(path: str, cut: str) -> bool:
    return fnmatch.fnmatch(path, cut) or fnmatch.fnmatch(path, f"{cut}.*")
