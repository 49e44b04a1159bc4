"""Chooses the division of a program over the ranks of the tp axis that takes the fewest seconds of
computation and communication.

Every node gets a strategy, every graph input a placement. If a node wants an operand in another placement
than the one it is produced in, the reshard is paid once for all nodes that want it so. Bucket elimination
solves this exactly (`cheapest.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshloom.comm.pieces import Pieces
from meshloom.program.cost.cost import Cost, costs
from meshloom.program.cost.rates import Rates, default_rates, rates_here
from meshloom.program.ir.program import Program
from meshloom.program.sizes.alike import alike
from meshloom.tensor_parallel.layout.cuts import StripNumbers, pieces_of
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import Placement, cut_of
from meshloom.tensor_parallel.search.options import Held
from meshloom.tensor_parallel.search.problem import InfeasibleError, Problem
from meshloom.tensor_parallel.search.strategies import Strategy

__all__ = [
    "DivisionChoice",
    "Held",
    "Rates",
    "choice_in",
    "choice_of_numbers",
    "choice_resized",
    "choose",
    "digest_of_choice",
    "numbers_of_choice",
    "rates_for",
]


@dataclass(frozen=True, kw_only=True)
class DivisionChoice:
    """The division of a program. strategies: of each node. input_placements: of each graph input:
    parameter, buffer, input or constant.

    seconds: the minimised cost. chosen: 1 if repeated blocks are divided identically, else 0; then, in order,
        which of its options each graph input and node takes.
    is_proved: whether the division is known to be optimal; if not, the search was too large.
    """

    num_ranks: int
    layout: Layout
    numbers: StripNumbers
    strategies: Mapping[str, Strategy]
    input_placements: Mapping[str, Placement]
    seconds: float
    chosen: tuple[int, ...]
    is_proved: bool = True

    def placement(self, value: str) -> Placement:
        """The placement in which a value is produced."""
        return (
            self.input_placements[value] if value in self.input_placements else self.strategies[value].output
        )

    def pieces(self, value: str, placement: Placement) -> Pieces:
        """What each rank holds of a value with one tensor."""
        return pieces_of(self.layout.values[value][0], cut_of(placement), self.numbers, self.num_ranks)


def choose(
    layout: Layout,
    num_ranks: int,
    rates: Rates | None = None,
    *,
    held: Held | None = None,
    placements: Mapping[str, str] | None = None,
    memory_bytes: float | None = None,
    priced: Mapping[str, Cost] | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> DivisionChoice:
    """The cheapest division of a program over `num_ranks` ranks.

    rates: `default_rates` of the device by default; `rates_for` gives this machine's.
    held: the shards of parameters and buffers, if they are fixed.
    placements: pattern of module names -> how to shard their parameters, as in `Plan.tp_placements`, but for those
        that are held.
    memory_bytes: what a rank may hold of parameters, gradients, optimizer state and saved activations.
    priced: `costs` of the program, if already known.
    told: as of `Problem`.
    Raises `PlanError` if there is no such division.
    """
    price = rates or default_rates(layout.program.device.type)
    known = priced or costs(layout.program)

    def solved(*, share_blocks: bool, sends_parameters: bool = False) -> DivisionChoice:
        problem = Problem(
            layout,
            num_ranks,
            rates=price,
            costs=known,
            held=held,
            pins=placements,
            share_blocks=share_blocks,
            sends_parameters=sends_parameters,
            told=told,
        )
        return _choice(problem, *problem.solve(memory_bytes))

    with suppress(InfeasibleError):
        return solved(share_blocks=True)
    if held:
        with suppress(InfeasibleError):
            return solved(share_blocks=False)
    # Shards that others have fixed may go with no way of computing with them: then ranks gather what they must.
    return solved(share_blocks=False, sends_parameters=bool(held))


def rates_for(program: Program, num_ranks: int) -> Rates:
    """This machine's measured rates for a program's device and the dtype of most of its parameters. Raises
    `MachineError`."""
    sizes: Counter[str] = Counter()
    for each in program.parameters.values():
        sizes[str(each.meta.dtype).removeprefix("torch.")] += math.prod(each.meta.shape)
    (dtype, _), *_ = sizes.most_common(1) or [("float32", 0)]
    return rates_here(program.device.type, num_ranks, dtype)


def numbers_of_choice(choice: DivisionChoice) -> list[int]:
    """A choice as integers, to be sent to other ranks."""
    return list(choice.chosen)


def digest_of_choice(choice: DivisionChoice) -> str:
    """A short hash of a program and its division: equal for equal choices, in any process."""
    facts = [
        choice.layout.program.digest(),
        str(choice.num_ranks),
        *map(repr, choice.input_placements.items()),
        *map(repr, choice.strategies.items()),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def choice_of_numbers(
    layout: Layout,
    num_ranks: int,
    numbers: Sequence[int],
    *,
    held: Held | None = None,
    placements: Mapping[str, str] | None = None,
) -> DivisionChoice:
    """The choice that another rank made for the same program with the same `held` and `placements`."""
    share_blocks, *taken = numbers
    return _choice(
        Problem(
            layout, num_ranks, rates=Rates(), held=held, pins=placements, share_blocks=bool(share_blocks)
        ),
        taken,
        0.0,
    )


def choice_in(
    layout: Layout,
    choice: DivisionChoice,
    *,
    held: Held | None = None,
    placements: Mapping[str, str] | None = None,
) -> DivisionChoice | None:
    """The same choice for the same program in another precision, where casts may have other strategies. None:
    one of its options does not exist."""
    problem = Problem(
        layout,
        choice.num_ranks,
        rates=Rates(),
        held=held,
        pins=placements,
        share_blocks=bool(choice.chosen[0]),
    )
    wanted: list[tuple[Any, list[tuple[Any, int]]]] = [
        (choice.input_placements[value], list(row)) for value, row in problem.placements.items()
    ]
    wanted += [(choice.strategies[name], list(row)) for name, row in problem.strategies.items()]
    numbers = [next((place for place, (each, _) in enumerate(row) if each == own), -1) for own, row in wanted]
    return _choice(problem, numbers, choice.seconds, choice.is_proved) if -1 not in numbers else None


def choice_resized(layout: Layout, choice: DivisionChoice, *, held: Held) -> DivisionChoice | None:
    """The same choice, made with these `held`, for the same program at other sizes. None: its options differ there."""
    try:
        resized = choice_of_numbers(layout, choice.num_ranks, list(choice.chosen), held=held)
    except (IndexError, ValueError):  # a dim became too small or large enough to be sharded
        return None
    same = alike(choice.strategies, resized.strategies) and alike(
        choice.input_placements, resized.input_placements
    )
    return resized if same else None


def _choice(
    problem: Problem, numbers: Sequence[int], seconds: float, is_proved: bool = True
) -> DivisionChoice:
    split = len(problem.placements)
    return DivisionChoice(
        num_ranks=problem.num_ranks,
        layout=problem.layout,
        numbers=problem.numbers,
        strategies={
            name: row[at][0]
            for (name, row), at in zip(problem.strategies.items(), numbers[split:], strict=True)
        },
        input_placements={
            value: row[at][0]
            for (value, row), at in zip(problem.placements.items(), numbers[:split], strict=True)
        },
        seconds=seconds,
        chosen=(int(problem.share_blocks), *numbers),
        is_proved=is_proved,
    )
