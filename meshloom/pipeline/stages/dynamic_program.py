"""The cuts with the fastest slowest stage, within memory limits and given the stages of parameters.

    slowest[k][end] = min over start of max(slowest[k - 1][start], time of [start, end))

This is exact, since every limit is of a single stage: its memory, and the operators that it must not contain.
If ranks have several stages, these share the rank's memory. Then the result is the best one found by dividing
the memory between them and by moving single cuts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy

from meshloom.pipeline.stages.intervals import Intervals, Row

STEPS = (-1, 1, -2, 2, -3, 3, -5, 5, -8, 8)  # places by which cuts are moved
MOVES = 2000  # combinations tried at most
ROUNDS = 12  # of dividing a rank's memory between its stages


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The constraints of the stages. ranks: stage -> its rank. memory_bytes: of a rank; inf: no limit.

    in_flight: [moment][stage], microbatches whose activations are held; the limit applies to each moment.
    forbidden: [stage] -> numbers of operators that it must not contain. all_hold: every stage has parameters.
    """

    ranks: Sequence[int]
    memory_bytes: float
    in_flight: Sequence[Sequence[int]]
    forbidden: Mapping[int, Sequence[int]]
    all_hold: bool = False

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @property
    def is_shared(self) -> bool:
        """Whether a rank has several stages."""
        return len(set(self.ranks)) < len(self.ranks)


def best_cuts(
    line: Intervals,
    limits: Limits,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> list[int] | None:
    """The ends of all stages but the last; None: none were found. Ties go to cuts that send the least. told: called with the
    number of ends of a stage that have been looked at, and that of all."""
    unshared = [limits.memory_bytes] * limits.num_stages
    found = _fastest(line, limits, unshared, told)
    if found is None or not limits.is_shared or _excess(line, limits, found) <= 0:
        return found  # a lower bound if memory is shared
    return _best_sharing(line, limits, found)


def rank_bytes(line: Intervals, limits: Limits, cuts: Sequence[int]) -> list[float]:
    """The most bytes that every rank holds: parameters with their state, and activations in flight."""
    bounds = line.bounds(cuts)
    rows = [line.until(end, start) for start, end in bounds]
    found: list[float] = []
    for rank in range(max(limits.ranks) + 1):
        stages = [stage for stage, holder in enumerate(limits.ranks) if holder == rank]
        state = sum(float(rows[stage].state_bytes[0]) for stage in stages)
        state -= line.shared_bytes([bounds[stage] for stage in stages])
        kept = {stage: float(rows[stage].kept_bytes[0]) for stage in stages}
        most = max(sum(moment[stage] * kept[stage] for stage in stages) for moment in limits.in_flight)
        found.append(state + most)
    return found


def refined(
    line: Intervals, limits: Limits, cuts: Sequence[int], price: Callable[[Sequence[int]], float],
    told: Callable[[int, int], None] = lambda done, of: None
) -> list[int]:  # fmt: skip
    """Neighbouring cuts moved together by a few places as long as this lowers the price, within all limits.

    Several move at once, as a stage that must not become slower passes work from the one before to the one
    after. told: called with the number of moves that have been tried, and how many there are if no more helps.
    """
    places = line.places
    at = [places.index(cut) for cut in cuts]
    best = price(cuts)
    moves = [
        (first, last, step) for first in range(len(at)) for last in range(first, len(at)) for step in STEPS
    ]
    since = 0  # consecutive moves without improvement
    every = itertools.islice(itertools.cycle(moves) if moves else (), MOVES)
    for move, (first, last, step) in enumerate(every, start=1):
        since += 1
        tried = [each + step if first <= number <= last else each for number, each in enumerate(at)]
        if _in_order(tried, len(places)):
            chosen = [places[each] for each in tried]
            cost = price(chosen)
            if cost < best * (1 - 1e-9) and _is_legal(line, limits, chosen):
                at, best, since = tried, cost, 0
        told(move, move + len(moves) - since)
        if since >= len(moves):
            break
    return [places[each] for each in at]


def _fastest(
    line: Intervals,
    limits: Limits,
    budgets: Sequence[float],
    told: Callable[[int, int], None] = lambda done, of: None,
) -> list[int] | None:
    """The exact solution for stages that may hold `budgets` bytes each. A solution on some of the places
    bounds the search over all of them. told: as of `best_cuts`."""
    found, most = None, math.inf
    rounds = [*(_some_places(line, count * limits.num_stages) for count in (16, 128)), line.places]
    every = sum(len(each) + 1 for each in [*rounds, line.places])
    looked = 0

    def one_more() -> None:
        nonlocal looked
        looked += 1
        told(looked, every)

    for places in rounds:
        found = _ends(line, limits, budgets, lambda row: row.takes, numpy.maximum, at=places, most=most, looked=one_more)  # fmt: skip
        most = _longest(line, found) * (1 + 1e-9) if found is not None else most
    if found is None:
        return None

    def sends(row: Row) -> numpy.ndarray:
        return numpy.where(row.takes <= most, row.moved_bytes, math.inf)

    return _ends(line, limits, budgets, sends, numpy.add, at=line.places, most=most, looked=one_more)


def _some_places(line: Intervals, count: int) -> list[int]:
    """About `count` of the places, with equal computation between them."""
    if len(line.places) <= count:
        return line.places
    work = line.seconds[line.places]
    numbers = numpy.unique(numpy.searchsorted(work, numpy.linspace(work[0], work[-1], count)))
    return [line.places[number] for number in numbers]


def _ends(
    line: Intervals,
    limits: Limits,
    budgets: Sequence[float],
    cost: Callable[[Row], numpy.ndarray],
    combine: Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray],
    *,
    at: Sequence[int],
    most: float = math.inf,
    looked: Callable[[], None] = lambda: None,
) -> list[int] | None:
    """The cuts of least cost, where the stages' costs are combined by `combine`. at: the places. most:
    seconds that a stage may take. looked: called for every place at which a stage may end."""
    places = numpy.array([0, *at, line.num_nodes])
    work = line.seconds[places]  # a stage that takes as much or more is excluded
    count = limits.num_stages
    slack = most * 1e-9
    most_after = [most * (count - stage - 1) if stage < count - 1 else 0.0 for stage in range(count)]
    counts = [max(moment[stage] for moment in limits.in_flight) for stage in range(count)]
    barred = [_sums_of(limits.forbidden.get(stage, ()), line.num_nodes) for stage in range(count)]
    least = numpy.full((count + 1, len(places)), math.inf)  # [number of stages, end]
    least[0, 0] = 0.0 if combine is numpy.add else -math.inf
    start_of = numpy.zeros((count + 1, len(places)), dtype=int)
    for end in range(1, len(places)):
        looked()
        stages = [
            stage for stage in range(count)
            if work[end] <= (stage + 1) * most + slack and work[-1] - work[end] <= most_after[stage] + slack
        ]  # fmt: skip
        first = int(numpy.searchsorted(work, work[end] - most - slack))
        if not stages or first == end:
            continue
        row = line.until(int(places[end]), int(places[first]))
        starts = places[first:end] - row.first
        costs, state, kept = cost(row)[starts], row.state_bytes[starts], row.kept_bytes[starts]
        for stage in stages:
            found = combine(least[stage, first:end], costs)
            if math.isfinite(budgets[stage]):
                found = numpy.where(state + counts[stage] * kept <= budgets[stage], found, math.inf)
            if limits.all_hold:
                using = line.using_parameters
                found = numpy.where(using[places[end]] > using[places[first:end]], found, math.inf)
            if stage in limits.forbidden:
                sums = barred[stage]
                found = numpy.where(sums[places[end]] == sums[places[first:end]], found, math.inf)
            best = int(found.argmin())
            least[stage + 1, end], start_of[stage + 1, end] = found[best], first + best
    if least[count, -1] == math.inf:
        return None
    ends: list[int] = []
    end = len(places) - 1
    for stage in range(count, 0, -1):
        end = int(start_of[stage, end])
        ends.append(int(places[end]))
    return ends[-2::-1]


def _best_sharing(line: Intervals, limits: Limits, start: Sequence[int]) -> list[int] | None:
    """The fastest cuts found that satisfy the memory limit of ranks with several stages."""
    even = [limits.memory_bytes / limits.ranks.count(rank) for rank in limits.ranks]
    starts = [each for each in (start, _even(line, limits)) if each is not None]
    tried = [_by_parts(line, limits, start), _fastest(line, limits, even)]
    tried += [_with_less_excess(line, limits, each) for each in starts]
    fitting = [cuts for cuts in tried if cuts is not None and _excess(line, limits, cuts) <= 0]
    improved = [refined(line, limits, cuts, lambda tried: _longest(line, tried)) for cuts in fitting]
    return min(improved, key=lambda cuts: _longest(line, cuts), default=None)


def _by_parts(line: Intervals, limits: Limits, start: Sequence[int]) -> list[int] | None:
    """If a rank exceeds its memory, its stages get smaller budgets, until all ranks fit."""
    cuts: list[int] | None = list(start)
    budgets = [limits.memory_bytes] * limits.num_stages
    for _ in range(ROUNDS):
        if cuts is None or _excess(line, limits, cuts) <= 0:
            return cuts
        holds, stages = rank_bytes(line, limits, cuts), _stage_bytes(line, limits, cuts)
        for stage, rank in enumerate(limits.ranks):
            if holds[rank] > limits.memory_bytes:
                share = stages[stage] * limits.memory_bytes / holds[rank] * 0.999
                budgets[stage] = min(budgets[stage], share)
        cuts = _fastest(line, limits, budgets)
    return cuts


def _even(line: Intervals, limits: Limits) -> list[int] | None:
    """The cuts whose largest stage is smallest, if all held equally many microbatches."""
    count = max(map(max, limits.in_flight))
    unlimited = [math.inf] * limits.num_stages

    def holds(row: Row) -> numpy.ndarray:
        return row.state_bytes + count * row.kept_bytes

    return _ends(line, limits, unlimited, holds, numpy.maximum, at=line.places)


def _with_less_excess(line: Intervals, limits: Limits, start: Sequence[int]) -> list[int]:
    """Cuts moved to reduce the largest excess of a rank's memory."""
    free = replace(limits, memory_bytes=math.inf)
    return refined(line, free, start, lambda tried: max(_excess(line, limits, tried), 0.0))


def _stage_bytes(line: Intervals, limits: Limits, cuts: Sequence[int]) -> list[float]:
    found: list[float] = []
    for stage, (start, end) in enumerate(line.bounds(cuts)):
        row = line.until(end, start)
        count = max(moment[stage] for moment in limits.in_flight)
        found.append(float(row.state_bytes[0] + count * row.kept_bytes[0]))
    return found


def _excess(line: Intervals, limits: Limits, cuts: Sequence[int]) -> float:
    if math.isinf(limits.memory_bytes):
        return 0.0
    return sum(max(each - limits.memory_bytes, 0.0) for each in rank_bytes(line, limits, cuts))


def _longest(line: Intervals, cuts: Sequence[int]) -> float:
    return max(float(line.until(end, start).takes[0]) for start, end in line.bounds(cuts))


def _is_legal(line: Intervals, limits: Limits, cuts: Sequence[int]) -> bool:
    for stage, (start, end) in enumerate(line.bounds(cuts)):
        if any(start <= number < end for number in limits.forbidden.get(stage, ())):
            return False
        if limits.all_hold and line.using_parameters[start] == line.using_parameters[end]:
            return False
    return _excess(line, limits, cuts) <= 0


def _in_order(places: Sequence[int], count: int) -> bool:
    return places[0] >= 0 and places[-1] < count and all(before < after for before, after in pairwise(places))


def _sums_of(numbers: Sequence[int], length: int) -> numpy.ndarray:
    counts = numpy.bincount(numpy.array(numbers, dtype=int), minlength=length)[:length]
    return numpy.concatenate([[0], numpy.cumsum(counts)])
