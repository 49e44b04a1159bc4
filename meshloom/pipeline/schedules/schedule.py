"""A pipeline schedule as a value: the list of actions of each rank, with a text form.

An action prints as `2F0`: stage 2, forward, microbatch 0. The kinds:

    F   forward
    B   backward, of inputs and weights
    I   backward of inputs only        W   backward of weights, later

Four stages, six microbatches, one-forward-one-backward:

    rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
    rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    rank 2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
    rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5

A schedule contains no messages: the stages determine which values are sent, and
`pipeline/runtime/point_to_point.py` derives when. The same lists are checked, priced, drawn and executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from meshloom.core.errors import PlanError

Kind = Literal["F", "B", "I", "W"]
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One forward or backward of a stage for a microbatch.

    >>> str(Action(2, "F", 0)), Action.parse("1W12").microbatch
    ('2F0', 12)
    """

    stage: int
    kind: Kind
    microbatch: int

    @staticmethod
    def parse(text: str) -> Action:
        """Parses the text form."""
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"{text!r} is not an action. An action is a stage, one of {', '.join(get_args(Kind))}, and a microbatch, like 2F0."
            )
        kinds: dict[str, Kind] = {each: each for each in get_args(Kind)}
        return Action(int(found[1]), kinds[found[2]], int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every rank along pp for one step.

    name: as in a plan.
    ranks: stage -> the rank that holds it.
    num_microbatches: m.
    actions: [rank][position].
    """

    name: str
    ranks: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages, virtual ones included."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """p, the ranks along pp."""
        return len(self.actions)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of all backwards in two halves."""
        return frozenset((action.stage, action.microbatch) for _, action in self if action.kind == "I")

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """The action that computes the gradients of a stage's inputs: B, or I if its backward is split."""
        return Action(stage, "I" if (stage, microbatch) in self.split else "B", microbatch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the model's order."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """(rank, action) of all actions, rank by rank."""
        return ((rank, action) for rank, actions in enumerate(self.actions) for action in actions)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Parses the text form, as `str()` gives it."""
        head, *rows = [line for line in text.strip().splitlines() if line.strip()]
        found = re.fullmatch(r"(\S+): stages on ranks ([\d ]+), (\d+) microbatch(?:es)?", head.strip())
        if found is None:
            raise PlanError(
                f"{head!r} is not the header of a schedule. It looks like '1f1b: stages on ranks 0 1 2 3, 6 microbatches'."
            )
        actions: list[tuple[Action, ...]] = []
        for number, row in enumerate(rows):
            name, colon, cells = row.partition(":")
            if not colon or name.strip() != f"rank {number}":
                raise PlanError(
                    f"Row {number} of the schedule begins with {name.strip()!r}, not with 'rank {number}:'."
                )
            actions.append(tuple(Action.parse(cell) for cell in cells.split()))
        ranks, count = tuple(map(int, found[2].split())), int(found[3])
        return Schedule(name=found[1], ranks=ranks, num_microbatches=count, actions=tuple(actions))

    def __str__(self) -> str:
        head = f"{self.name}: stages on ranks {' '.join(map(str, self.ranks))}, {self.num_microbatches} microbatch{'es' * (self.num_microbatches != 1)}"
        rows = (f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.actions))
        return "\n".join([head, *rows])


def looped(num_ranks: int, per_rank: int) -> tuple[int, ...]:
    """Stages in round-robin order: stage -> rank.

    >>> looped(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * per_rank


def folded(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank in a V, so that the first rank also has the last stage: stage -> rank.

    >>> folded(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))
