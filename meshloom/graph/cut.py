"""Where a program is cut into stages: so that the slowest stage is as fast as can be.

The operators are taken in eager's order, in which every stage is one run of them: no value flows back. A stage takes what its operators
take, forward and backward, and what sending over its two ends takes. The best ends are found exactly, by dynamic programming over all
places where the program may be cut:

    slowest[k][end] = min over start of max(slowest[k - 1][start], time of [start, end))

A place is left out where a tuple or a number would cross, or where a buffer that is updated is used on both sides. Or the user names the modules that begin stages.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy

from meshloom.errors import PlanError
from meshloom.graph.cost import Cost
from meshloom.graph.nodes import refs_in
from meshloom.graph.program import Program
from meshloom.graph.rates import Rates
from meshloom.graph.stages import computed_of_the_batch, updating


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage: seconds of compute per microbatch (forward and backward), bytes of its parameters and of the activations that a microbatch
    keeps, and bytes of the values that leave it (one way).

    module: that in which it begins.
    """

    module: str
    seconds: float
    parameter_bytes: int
    kept_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class CutChoice:
    """stage_of: node -> stage. stages: what each costs."""

    stage_of: Mapping[str, int]
    stages: tuple[StageCost, ...]

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
    in_flight: Sequence[int] = (),
    state_factor: float = 1.0,
) -> CutChoice:
    """The stage of every node.

    cuts: modules that begin the stages after the first, instead of a choice.
    memory_bytes: most that a stage may hold: `state_factor` times its parameters' bytes, and for [stage] `in_flight` microbatches what one keeps.
    Raises `PlanError` if there are fewer places to cut than wanted, a module is not there, or no cut fits into the memory.
    """
    line = _Line(program, costs, rates or Rates())
    if cuts:
        ends = _given(program, line, cuts, num_stages)
    else:
        ends = _best(line, num_stages, memory_bytes, in_flight or [1] * num_stages, state_factor)
    bounds = [0, *ends, len(program.nodes)]
    stage_of = {node.name: stage for stage, (start, end) in enumerate(pairwise(bounds)) for node in program.nodes[start:end]}
    return CutChoice(stage_of=stage_of, stages=tuple(line.stage(start, end) for start, end in pairwise(bounds)))


class _Line:
    """The operators in order, with sums up to every place between them. A place is a number of operators: those before it."""

    def __init__(self, program: Program, costs: Mapping[str, Cost], rates: Rates) -> None:
        self.program = program
        self.rates = rates
        nodes = program.nodes
        at = {node.name: number for number, node in enumerate(nodes)}
        free = computed_of_the_batch(program)
        seconds = [rates.node_seconds(costs[node.name]) for node in nodes]
        given = {each.value for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)} | set(program.constants)
        kept = numpy.zeros(len(nodes))
        seen: set[str] = set()
        for number, node in enumerate(nodes):
            for each in costs[node.name].kept:
                if each.memory not in seen and each.memory not in given:
                    seen.add(each.memory)
                    kept[number] += each.num_bytes
        variables = {each.value: each for each in program.parameters.values()}
        weights = numpy.zeros(len(nodes))
        held: set[str] = set()
        for number, node in enumerate(nodes):
            for ref in node.operands():
                if ref.name in variables and ref.name not in held:
                    held.add(ref.name)
                    weights[number] += variables[ref.name].meta.num_bytes
        self.seconds, self.kept, self.weights = _sums(seconds), _sums(kept), _sums(weights)
        last = {name: number for number, node in enumerate(nodes) for name in (ref.name for ref in node.operands())}
        last |= {ref.name: len(nodes) for ref in refs_in(program.outputs)}
        self.crossing = numpy.zeros(len(nodes) + 1)  # bytes of the values that are alive across a place, and come back where they have a gradient
        self.one_way = numpy.zeros(len(nodes) + 1)
        legal = numpy.ones(len(nodes) + 1, dtype=bool)
        for name, number in at.items():
            until = last.get(name, number)
            if name in free or until <= number:
                continue
            outputs = nodes[number].outputs
            if len(outputs) != 1:
                legal[number + 1 : until + 1] = False
                continue
            size = outputs[0].num_bytes
            self.one_way[number + 1 : until + 1] += size
            self.crossing[number + 1 : until + 1] += size * (2 if outputs[0].requires_grad else 1)
        for together in updating(program).values():
            places = [at[name] for name in together]
            legal[min(places) + 1 : max(places) + 1] = False
        own = _sums([float(node.name not in free) for node in nodes])
        legal &= (own > 0) & (own < own[-1])  # no stage computes nothing
        self.places = [int(place) for place in numpy.flatnonzero(legal)]

    def stage(self, start: int, end: int) -> StageCost:
        """What the operators from one place to another cost."""
        nodes = self.program.nodes
        module = next((node.path for node in nodes[start:end] if node.path), "")
        return StageCost(
            module=module,
            seconds=float(self.seconds[end] - self.seconds[start]),
            parameter_bytes=int(self.weights[end] - self.weights[start]),
            kept_bytes=int(self.kept[end] - self.kept[start]),
            sent_bytes=int(self.one_way[end]) if end < len(nodes) else 0,
        )


def _best(line: _Line, num_stages: int, memory_bytes: float | None, in_flight: Sequence[int], state_factor: float) -> list[int]:
    if len(line.places) < num_stages - 1:
        raise PlanError(
            f"The model can be cut at {len(line.places)} places, and {num_stages} stages need {num_stages - 1}. Use at most {len(line.places) + 1} stages."
        )
    places = numpy.array([0, *line.places, len(line.program.nodes)])
    sending = line.crossing[places] / line.rates.link_bytes_per_second
    slowest = numpy.full(len(places), math.inf)
    slowest[0] = 0.0
    back: list[numpy.ndarray] = []
    for stage in range(num_stages):
        reached = numpy.full(len(places), math.inf)
        start_of = numpy.zeros(len(places), dtype=int)
        for end in range(1, len(places)):
            starts = slice(0, end)
            takes = line.seconds[places[end]] - line.seconds[places[starts]] + sending[starts] + sending[end]
            if memory_bytes is not None:
                holds = state_factor * (line.weights[places[end]] - line.weights[places[starts]])
                holds = holds + in_flight[stage] * (line.kept[places[end]] - line.kept[places[starts]])
                takes = numpy.where(holds <= memory_bytes, takes, math.inf)
            # Of ends that are as good, those that leave less to send: a thousandth of it counts.
            found = numpy.maximum(slowest[starts], takes) + 1e-3 * (sending[starts] + sending[end])
            start_of[end] = int(found.argmin())
            reached[end] = found[start_of[end]]
        slowest = reached
        back.append(start_of)
    if not math.isfinite(slowest[-1]):
        raise PlanError(
            f"No cut into {num_stages} stages fits into {_gib(memory_bytes or 0)} a rank: parameters with their gradients and optimizer state are "
            f"{_gib(state_factor * float(line.weights[-1]))}, and the activations of one microbatch {_gib(float(line.kept[-1]))}. "
            "Use more stages, more microbatches, or a schedule that holds fewer of them."
        )
    ends: list[int] = []
    at = len(places) - 1
    for start_of in reversed(back):
        at = int(start_of[at])
        ends.append(int(places[at]))
    return ends[-2::-1] if len(ends) > 1 else []


def _given(program: Program, line: _Line, cuts: Sequence[str], num_stages: int) -> list[int]:
    if len(cuts) != num_stages - 1:
        raise PlanError(f"cuts={'+'.join(cuts)} makes {len(cuts) + 1} stages, and the plan has {num_stages}. Name {num_stages - 1}.")
    ends: list[int] = []
    for cut in cuts:
        found = next(
            (number for number, node in enumerate(program.nodes) if fnmatch.fnmatch(node.path, cut) or fnmatch.fnmatch(node.path, f"{cut}.*")), None
        )
        if found is None:
            paths = list(dict.fromkeys(node.path.split(".")[0] for node in program.nodes if node.path))
            raise PlanError(f"cuts={cut}: no module of that name runs in the forward. There are {', '.join(paths[:8])}.")
        if ends and found <= ends[-1]:
            raise PlanError(f"cuts={'+'.join(cuts)}: {cut} runs before {cuts[len(ends) - 1]}. Name them in the order of the forward.")
        if found not in line.places:
            raise PlanError(
                f"cuts={cut}: the model cannot be cut before {cut}"
                + (", which runs first." if found == 0 else ": several tensors in one value, or a buffer that is updated, would be on both sides.")
            )
        ends.append(found)
    return ends


def _sums(values: Sequence[float] | numpy.ndarray) -> numpy.ndarray:
    return numpy.concatenate([[0.0], numpy.cumsum(values)])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"
