"""A list of actions that is searched for given durations and limits, and never longer than the named ones.

Microbatches of one size are exchangeable, so the order on a rank is a word: its n-th F is the forward of microbatch n.

    rank 0: FFFIFWIWIWIW        moving a letter: FFFIFWI[W]IWIW -> FFFI[W]FWIIWIW
    rank 1: FFIWFIWFIWIW
    rank 2: FIWFIWFIWFIW

The search starts with the shortest named or greedy schedule within the limits, and moves letters as long as no step gets
longer. All draws are from a fixed seed: equal arguments give equal schedules on every rank.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import most_in_flight
from meshloom.pipeline.schedules.greedy import build_greedily
from meshloom.pipeline.schedules.schedule import Action, Kind, Schedule, looped
from meshloom.pipeline.schedules.timing import Durations, length_of

NAME = "found"
SIMULATED_ACTIONS = 30_000  # by the search: of large schedules, fewer moves are tried
REACH = 4  # places that a letter moves at most
WORTH = 1 - 1e-9  # shorter by less than this is rounding

Words = list[str]  # [rank]


def found(p: int, m: int, v: int, durations: Durations | None) -> Schedule:
    """Within the memory of 1f1b; without durations, which come with the stages, it is 1f1b."""
    if durations is None:
        return replace(make_schedule("1f1b", p, m), name=NAME)
    return find_schedule(p, m, durations, limits_of_1f1b(p))


def limits_of_1f1b(p: int) -> list[int]:
    """[rank], the most microbatches whose activations 1f1b holds.

    >>> limits_of_1f1b(3)
    [3, 2, 1]
    """
    return [p - rank for rank in range(p)]


def find_schedule(p: int, m: int, durations: Durations, limits: Sequence[int]) -> Schedule:
    """The shortest schedule found for one stage on each of p ranks and m microbatches.

    limits: [rank], the most activations held at a time, from a forward to the end of its backward; at least 1.
    """
    named, steps = [*_named(p, m, durations, limits)], _Steps(p, m, durations)
    starts = [[_word(row) for row in each.actions] for each in (*named, *_greedy(p, m, durations, limits))]
    words, seconds = _improved(steps, min(starts, key=lambda each: _measure(steps.ends(each))), limits)
    # What no durations tell, as launches of halves, or memory, is saved where it gains nothing.
    as_short = [each for each in named if length_of(each, durations) * WORTH <= seconds]
    least = min(as_short, key=lambda each: (len(each.split), sum(most_in_flight(each))), default=None)
    return replace(least, name=NAME) if least else _schedule(words, m)


def _named(p: int, m: int, durations: Durations, limits: Sequence[int]) -> Iterator[Schedule]:
    for name, entry in SCHEDULES.items():
        if entry.stages_per_rank == 1 and name != NAME:
            schedule = make_schedule(name, p, m, durations=durations)
            if all(most <= limit for most, limit in zip(most_in_flight(schedule), limits, strict=True)):
                yield schedule


def _greedy(p: int, m: int, durations: Durations, limits: Sequence[int]) -> Iterator[Schedule]:
    for urgent in ("IFW", "FIW", "IWF"):
        schedule = build_greedily(
            NAME, looped(p, 1), m, limits=limits, durations=durations, split=True, urgent=urgent, forwards="deep"
        )  # fmt: skip
        assert schedule is not None, "with one stage on each rank every limit has a schedule"
        yield schedule


def _improved(steps: _Steps, words: Words, limits: Sequence[int]) -> tuple[Words, float]:
    """Words from which no move that was tried leads to a shorter step, and its length.

    Of two steps of one length the one whose ranks end earlier is better, and equal ones are passed through.
    """
    draw, letters = random.Random(0), len(words[0])
    now = _measure(steps.ends(words))
    for _ in range(SIMULATED_ACTIONS // (letters * len(words))):
        rank, source = int(draw.random() * len(words)), int(draw.random() * letters)
        target = source + int(draw.random() * (2 * REACH + 1)) - REACH
        word = _moved(words[rank], source, max(0, min(letters - 1, target)))
        if word == words[rank] or not _is_legal(word, limits[rank]):
            continue
        moved = [*words[:rank], word, *words[rank + 1 :]]
        if (then := _measure(steps.ends(moved))) <= now:
            words, now = moved, then
    return words, now[0]


def _measure(ends: Sequence[float]) -> tuple[float, float]:
    return max(ends), sum(ends)


def _moved(word: str, source: int, target: int) -> str:
    rest = word[:source] + word[source + 1 :]
    return rest[:target] + word[source] + rest[target:]


def _is_legal(word: str, limit: int) -> bool:
    """Whether each action follows what it needs of its own rank, and no more than `limit` activations are held."""
    forwards = inputs = weights = 0
    for letter in word:
        forwards += letter == "F"
        inputs += letter == "I"
        weights += letter == "W"
        if not weights <= inputs <= forwards <= weights + limit:
            return False
    return True


def _word(row: Sequence[Action]) -> str:
    return "".join("IW" if action.kind == "B" else action.kind for action in row)


_KINDS: dict[str, Kind] = {"F": "F", "I": "I", "W": "W"}


def _schedule(words: Words, m: int) -> Schedule:
    rows: list[tuple[Action, ...]] = []
    for rank, word in enumerate(words):
        numbers = Counter[str]()
        row: list[Action] = []
        for letter in word:
            row.append(Action(rank, _KINDS[letter], numbers[letter]))
            numbers[letter] += 1
        rows.append(tuple(row))
    return Schedule(name=NAME, ranks=looped(len(words), 1), num_microbatches=m, actions=tuple(rows))


class _Steps:
    """Simulates words as `run_on_paper` does schedules, at a tenth of the time."""

    def __init__(self, p: int, m: int, durations: Durations) -> None:
        def takes(kind: Kind) -> list[list[float]]:
            return [[durations.of(Action(rank, kind, number)) for number in range(m)] for rank in range(p)]

        self._m = m
        self._takes = [{"F": f, "I": i, "W": w} for f, i, w in zip(takes("F"), takes("I"), takes("W"), strict=True)]  # fmt: skip
        self._there = [durations.transfer_of(Action(rank, "F", 0)) for rank in range(p)]
        self._back = [durations.transfer_of(Action(rank, "I", 0)) for rank in range(p)]

    def ends(self, words: Words) -> list[float]:
        """[rank], when its last action ends; infinite, if the ranks deadlock."""
        p, m = len(words), self._m
        # [rank][letter], when what its actions wait for has arrived, by microbatch
        arrived: list[dict[str, list[float]]] = [{"F": [], "I": [], "W": [0.0] * m} for _ in words]
        arrived[0]["F"] = [0.0] * m
        next_of = [{"F": 0, "I": 0, "W": 0} for _ in words]
        at, ends = [0] * p, [0.0] * p
        moved = True
        while moved:
            moved = False
            for rank, word in enumerate(words):
                now, takes, here, counts = ends[rank], self._takes[rank], arrived[rank], next_of[rank]
                for place in range(at[rank], len(word)):
                    letter = word[place]
                    number = counts[letter]
                    if number >= len(here[letter]):
                        break
                    now = max(now, here[letter][number]) + takes[letter][number]
                    counts[letter] = number + 1
                    if letter == "F":
                        last = rank + 1 == p
                        to, sent = (here["I"], 0.0) if last else (arrived[rank + 1]["F"], self._there[rank])
                        to.append(now + sent)
                    elif letter == "I" and rank:
                        arrived[rank - 1]["I"].append(now + self._back[rank])
                    at[rank], moved = place + 1, True
                ends[rank] = now
        return ends if sum(at) == p * 3 * m else [math.inf]
