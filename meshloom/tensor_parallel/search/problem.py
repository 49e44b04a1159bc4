"""The problem of dividing a program: what may be chosen, what it costs, and its cheapest solution.

Every graph input has one of its placements, every node one of its strategies (`options.py`). A value that is
wanted in another placement than it is produced in is resharded, once for all nodes that want it so
(`formulation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes
from meshloom.program.cost.cost import Cost
from meshloom.program.cost.rates import Rates
from meshloom.tensor_parallel.layout.cuts import cuts_by_axis, numbers_of
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.search.cheapest import Combination, cheapest
from meshloom.tensor_parallel.search.costs import DivisionCosts
from meshloom.tensor_parallel.search.formulation import Formulation
from meshloom.tensor_parallel.search.memory_limit import LimitError, cheapest_within
from meshloom.tensor_parallel.search.milp import SECONDS, OutOfTimeError
from meshloom.tensor_parallel.search.options import Held, Options
from meshloom.tensor_parallel.search.pins import Pins
from meshloom.tensor_parallel.search.repeats import Repeats, Representatives, UnlikeBlocksError, repeats_of


class InfeasibleError(PlanError):
    """No division satisfies all constraints."""


class Problem:
    """The options of a program's division, with their costs.

    costs: of its nodes; None: options can be counted, but not compared.
    held: shards that are fixed. pins: pattern of modules -> pin.
    share_blocks: repeated blocks are divided identically. This makes the problem smaller, and excludes
        divisions in which the surroundings of a block would have to follow one axis of it where another
        represents it. sends_parameters: ranks may gather shards of parameters to compute with them. told: as of
        `Formulation`, then as of `cheapest`.
    """

    def __init__(
        self,
        layout: Layout,
        num_ranks: int,
        *,
        rates: Rates,
        costs: Mapping[str, Cost] | None = None,
        held: Held | None = None,
        pins: Mapping[str, str] | None = None,
        share_blocks: bool = True,
        sends_parameters: bool = False,
        told: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._told = told
        self.layout = layout
        self.num_ranks = num_ranks
        self.share_blocks, self._sends_parameters = share_blocks, sends_parameters
        self.numbers = numbers_of(layout)
        self._cuts = cuts_by_axis(layout, self.numbers, num_ranks)
        self._pins = Pins(layout, self.numbers, self._cuts, num_ranks, pins) if pins else None
        self._options = Options(layout, self.numbers, self._cuts, num_ranks, held=held, pins=self._pins)
        self._costs = DivisionCosts(layout, self.numbers, self._cuts, num_ranks, rates=rates, costs=costs)
        self.formulation = self._formulation()
        self.placements = self.formulation.placements
        self.strategies = self.formulation.strategies

    def _formulation(self) -> Formulation:
        marks = self._pins.marks if self._pins else {}
        for loops in (True, False) if self.share_blocks else ():
            with suppress(UnlikeBlocksError):  # equal blocks with unequal options
                return self._formulated(repeats_of(self.layout, self.numbers, marks, loops))
        return self._formulated(Repeats())

    def _formulated(self, repeats: Repeats) -> Formulation:
        representatives = Representatives(self.layout, self.numbers, self._cuts, repeats)
        return Formulation(
            self._options, self._costs, representatives, self._told, sends_parameters=self._sends_parameters
        )

    def solve(self, memory_bytes: float | None = None) -> tuple[list[int], float, bool]:
        """The cheapest division: which of its options each graph input and node takes, in order; its seconds;
        whether nothing cheaper is known not to exist.

        memory_bytes: what a rank may hold.

        Raises `InfeasibleError` if there is no division, `PlanError` if none fits.
        """
        found = self._solution(memory_bytes)
        if found is None:
            raise InfeasibleError(
                f"No division of this program over tp={self.num_ranks} satisfies the plan. {self._way_out()}"
            )
        decisions = self.formulation.decisions.options
        taken = {numbers[value] for numbers, value in zip(decisions, found.values, strict=True)}
        rows = (*self.placements.values(), *self.strategies.values())
        return (
            [next(place for place, (_, number) in enumerate(row) if number in taken) for row in rows],
            found.total,
            found.is_proved,
        )

    def _way_out(self) -> str:
        return self._pins.way_out() if self._pins else "Use tp=1."

    def _solution(self, memory_bytes: float | None) -> Combination | None:
        decisions, reshards = self.formulation.decisions, self.formulation.reshards
        seconds = [np.array([decisions.seconds[number] for number in row]) for row in decisions.options]
        if memory_bytes is None:
            try:
                return cheapest(seconds, reshards, self._told)
            except OutOfTimeError:
                raise PlanError(
                    f"No division of this program over tp={self.num_ranks} that satisfies the plan was found in {SECONDS:.0f} s. {self._way_out()}"
                ) from None
        num_bytes = [np.array([decisions.num_bytes[number] for number in row]) for row in decisions.options]
        try:
            return cheapest_within(
                seconds, reshards, num_bytes, self.formulation.reshard_bytes, memory_bytes, self._told
            )
        except LimitError as error:
            raise PlanError(
                f"With tp={self.num_ranks} a rank holds {format_bytes(error.least)} or more of parameters, gradients, optimizer state and saved activations, "
                f"and the limit is {format_bytes(memory_bytes)}. Use a larger tp, or smaller microbatches."
            ) from None
