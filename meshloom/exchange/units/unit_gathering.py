"""Gathers units and reduces their gradients, in an order that ranks agree on as they go.

Which unit a rank needs next depends on its data: a branch is taken here and not there, a share has no chunk.
So ranks talk in rounds. In each, every rank says which units it needs, and of which the gradient is complete;
then all of them take part in gathering what any of them needs, and in adding up what any of them has:

    rank 0    needs 3, has 5   gather 3, gather 4, add up 5     computes with 3
    rank 1    needs 4          gather 3, gather 4, add up 5     computes with 4, drops 3, has added zeros to 5

A rank that has nothing left to compute takes part until all are so far: at the end of a pass (a step, an
evaluation), and in pipelines at the end of every action, so that replicas never wait for each other in
different actions. So does a rank before every other collective of these ranks within a pass (`meet`): one that waited in it
would be missing from the round of a rank that needs another unit first. What a round says is a few bytes over the ranks' control group. Every rank knows what all
have said, so all of them foresee the same unit from the order of the pass before, and gather it ahead, while
they compute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group, Work
from meshloom.exchange.units.unit_slices import Unit, UnitEntry, UnitFlat
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

STEP = "step"  # the kind of pass that is a step's forwards and backwards
_GOES_ON, _MEETS, _PASS_ENDED = range(3)  # how far a rank is


@dataclass(kw_only=True)
class _Gather:
    number: int
    values: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.values


@dataclass
class _Order:
    """The units that the first rank in need has needed, in the pass before and in this one."""

    before: list[int] = field(default_factory=list[int])
    now: list[int] = field(default_factory=list[int])
    at: int = -1  # the position in `before` that the pass has come to

    def begin(self) -> None:
        self.before, self.now, self.at = self.now or self.before, [], -1

    def came_to(self, number: int) -> int | None:
        """The next unit, if the pass goes on as the one before did."""
        self.now.append(number)
        if number in self.before[self.at + 1 :]:
            self.at = self.before.index(number, self.at + 1)
            return self.before[self.at + 1] if self.at + 1 < len(self.before) else None
        return None


class UnitGathering:
    """Of `units`, over `group`. control: the same ranks, for what a round says.

    ahead: whether the next unit is gathered while the rank computes with one. travels: what gradients travel as; None: their own
    dtype.
    """

    def __init__(
        self, units: Sequence[Unit], group: Group, control: Group, *, ahead: bool, travels: torch.dtype | None = None
    ) -> None:  # fmt: skip
        self.units, self._travelling = units, TravellingSums(group, travels)
        # parameter -> where it is
        self.places: dict[int, tuple[Unit, UnitFlat, UnitEntry]] = {
            id(entry.parameter): (unit, part, entry)
            for unit in units
            for part in unit.parts
            for entry in part.entries
        }
        self._traffic = Traffic()  # of this pass
        self._kind = ""
        self._chunks = 0  # that have ended in this pass, here
        self._most_chunks = 0  # on the rank that has most
        self._first_steps: dict[int, Traffic] = {}  # by the most chunks of a rank
        self._expected = Traffic()  # of all passes so far
        self._group, self._control, self._looks_ahead = group, control, ahead
        self._sums = [part for unit in units for part in unit.trainable_parts]
        self._number_of = {id(part): number for number, part in enumerate(self._sums)}
        self._complete: set[int] = set()  # of `_sums`, by number
        self._ahead: _Gather | None = None
        self._summing: list[tuple[Work, UnitFlat, Tensor, Tensor]] = []
        self._orders: dict[str, _Order] = {}
        self._order = _Order()

    def begin_pass(self, kind: str) -> None:
        """From now on units are needed in the order of the last pass of this kind."""
        self._order = self._orders.setdefault(kind, _Order())
        self._order.begin()
        self._kind, self._traffic, self._chunks = kind, Traffic(), 0

    def need(self, units: Collection[Unit]) -> None:
        """Returns when the units' values are here."""
        missing = [unit for unit in units if unit.values is None]
        if missing:
            self._round([unit.number for unit in missing], _GOES_ON)

    def complete(self, part: UnitFlat) -> None:
        """Its gradient is added up over the ranks, in the next round."""
        self._complete.add(self._number_of[id(part)])

    def chunk_ended(self) -> None:
        """All gradients of a chunk that will come have come."""
        self._chunks += 1
        for part in self._sums:
            if part.gradient is not None:
                self.complete(part)

    def end_action(self) -> None:
        """Returns when all ranks have ended their action, or the pass."""
        self.chunk_ended()
        self.meet()

    def meet(self) -> None:
        """Returns when every rank has called this, too, or has ended the pass."""
        while self._round([], _MEETS) < _MEETS:
            pass

    def unit_of(self, parameter: Tensor) -> Unit | None:
        """The parameter's unit."""
        place = self.place_of(parameter)
        return place[0] if place else None

    def place_of(self, parameter: object) -> tuple[Unit, UnitFlat, UnitEntry] | None:
        """Where the parameter is; None: in no unit."""
        return self.places.get(id(parameter))

    def end_pass(self) -> None:
        """Returns when all ranks have ended the pass, and all gradients are added up."""
        self.chunk_ended()
        while self._round([], _PASS_ENDED) < _PASS_ENDED:
            pass
        self._drop_ahead()
        self._finish_sums()
        if self._kind != STEP:
            self._expected += self._traffic
            self._traffic = Traffic()

    def end_step(self, *, late: bool) -> None:
        """After the pass that is a step. late: whether more gradients have come since it ended."""
        if late:
            self.end_pass()
        self._expected += self._first_steps.setdefault(self._most_chunks, self._traffic)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes handed to `group`: of every step as many as of the first with as many chunks, which shows what each
        of them uses."""
        return ExpectedBytes(so_far=self._expected)

    def _round(self, needed: Sequence[int], how_far: int) -> int:
        """How far the last rank is."""
        everyone = self._say(needed, how_far)
        num = len(self.units)
        anyone = [any(row) for row in zip(*everyone, strict=True)]
        wanted = [number for number in range(num) if anyone[number]]
        first = next((row.index(1) for row in everyone if any(row[:num])), None)
        self._finish_sums()
        if wanted and self._ahead is not None and self._ahead.number not in wanted:
            self._drop_ahead()
        started: list[_Gather] = []
        for number in wanted:
            if self._ahead is not None and self._ahead.number == number:
                started.append(self._ahead)
                self._ahead = None
            else:
                started.append(self._gather(number))
        for number, part in enumerate(self._sums):
            if anyone[num + number]:
                self._complete.discard(number)
                self._add_up(part)
        next_one = self._order.came_to(first) if first is not None else None
        if next_one is not None and self._looks_ahead:
            self._ahead = self._gather(next_one)
        for each in started:
            values, unit = each.wait(), self.units[each.number]
            if each.number in needed and unit.values is None:
                unit.fill(values)
        self._most_chunks = max(row[-2] for row in everyone)
        return min(row[-1] for row in everyone)

    def _say(self, needed: Sequence[int], how_far: int) -> list[list[int]]:
        """What every rank says: of every unit whether it is needed, of every flat tensor whether its gradient
        is complete, how many chunks have ended, and how far the rank is."""
        num = len(self.units)
        mine = torch.zeros(num + len(self._sums) + 2, dtype=torch.uint8)
        mine[list(needed)] = 1
        mine[[num + number for number in self._complete]] = 1
        mine[-2] = self._chunks % 256
        mine[-1] = how_far
        everyone = torch.empty(self._control.size * len(mine), dtype=torch.uint8)
        self._control.all_gather(everyone, mine).wait()
        return everyone.view(self._control.size, -1).tolist()

    def _gather(self, number: int) -> _Gather:
        parts = self.units[number].parts
        values = [part.full() for part in parts]
        works = [self._group.all_gather(flat, part.kept) for part, flat in zip(parts, values, strict=True)]
        self._traffic += Traffic.along("dp", all_gather=sum(part.kept.nbytes for part in parts))
        return _Gather(number=number, values=values, works=works)

    def _add_up(self, part: UnitFlat) -> None:
        gradient = part.take_gradient()
        output = torch.empty_like(part.kept)
        work = self._travelling.reduce_scatter(output, gradient)
        num_bytes = self._travelling.num_bytes(gradient.numel(), gradient.dtype)
        self._traffic += Traffic.along("dp", reduce_scatter=num_bytes)
        self._summing.append((work, part, output, gradient))

    def _finish_sums(self) -> None:
        for work, part, output, _ in self._summing:
            work.wait()
            part.summed = output if part.summed is None else part.summed.add_(output)
        self._summing.clear()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()  # nobody may free what is being written
            self._ahead = None
