"""A job's programs divided over the ranks of the tp axis, all with the same shards of parameters.

The first program fixes the shards; later ones are divided accordingly. One rank chooses, and sends its choice to the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from meshloom.comm.group import Group
from meshloom.comm.objects import collect, on_rank_0, share
from meshloom.comm.pieces import Pieces
from meshloom.core.errors import CaptureError, PlanError
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.nodes import refs_in
from meshloom.program.ir.program import Program
from meshloom.program.sizes.alike import alike
from meshloom.program.store.program_cache import ProgramCache
from meshloom.telemetry.timings import Timings
from meshloom.tensor_parallel.layout.layout import Layout, layout_of
from meshloom.tensor_parallel.partition import Partition, RoutedRows, partition
from meshloom.tensor_parallel.rules.table import rules_with
from meshloom.tensor_parallel.search.choose import (
    DivisionChoice,
    Held,
    choice_in,
    choice_of_numbers,
    choice_resized,
    choose,
    digest_of_choice,
    numbers_of_choice,
    rates_for,
)


class Division:
    """The division of a job's programs over the ranks of `group`, in which they communicate as they compute.

    rules: of the job, as text. placements: as in `choose`.
    memory_bytes: what a rank may hold; there are `num_stages` of them along pp.
    rates: by default those measured on the machine of the rank that chooses, else `default_rates`.
    """

    def __init__(
        self,
        group: Group,
        *,
        rules: Mapping[str, str] | None = None,
        rates: Rates | None = None,
        placements: Mapping[str, str] | None = None,
        memory_bytes: float | None = None,
        num_stages: int = 1,
        timings: Timings | None = None,
        stored: ProgramCache | None = None,
    ) -> None:
        self._num_stages = num_stages
        self._stored = stored
        self._rules_given = rules or {}
        self._timings = timings or Timings()
        self._group = group
        self._given = rates
        self.rates: Rates | None = None  # as used, on the rank that chose
        self._rules = rules_with(rules or {})
        self._memory_bytes = memory_bytes
        self._first: Partition | None = None
        self._placements = placements or {}
        self._held: Held = {}
        self._choices: list[DivisionChoice] = []  # of programs that differ in more than sizes
        self._choices_in_held: dict[int, DivisionChoice | None] = {}  # by number of the choice
        self.newest: DivisionChoice | None = None  # of the last program that was divided

    @property
    def share_divided(self) -> float:
        """Of the parameters' elements, those of parameters that are divided."""
        parts = self.first.parameters
        sizes = {name: math.prod(each.shape) for name, each in parts.items()}
        divided = sum(sizes[name] for name, each in parts.items() if not each.is_whole)
        return divided / max(1, sum(sizes.values()))

    @property
    def first(self) -> Partition:
        """The first program, which fixed the shards."""
        assert self._first is not None, "part() comes first"
        return self._first

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        """The shards of all parameters and buffers."""
        return {name: pieces for name, (pieces, _) in self._held.items()}

    @property
    def summed(self) -> tuple[str, ...]:
        """Parameters whose gradients are summed over the ranks, once a step."""
        return tuple(self._first.summed) if self._first else ()

    def part(
        self, program: Program, group: Group, priced: Program | None = None
    ) -> tuple[Program, Mapping[str, RoutedRows]]:
        """This rank's part of `program`, and its values whose rows are routed at run time.

        All ranks of `group` (the world, or those of a replica) call this; the first one chooses.

        priced: the program to choose for, with the same nodes; default: `program`.
        """
        held: Held | None = self._held if self._first else None
        placements = None if self._first else self._placements
        with self._timings.of("axes"):
            program = _without_unused_shards(program, held or {})
            layout = layout_of(program, self._rules)

        def cheapest() -> DivisionChoice:
            limit = self._memory_bytes * self._num_stages if self._memory_bytes and held is None else None
            weighed = layout_of(_without_unused_shards(priced, held or {}), self._rules) if priced else layout
            self.rates = self._given or rates_for(weighed.program, self._group.size)
            rates, stored = self.rates, self._stored if held is None and priced is None else None

            def choose_here() -> DivisionChoice:
                return choose(
                    weighed,
                    self._group.size,
                    rates,
                    held=held,
                    placements=placements,
                    memory_bytes=limit,
                    told=self._timings.counted,
                )

            try:
                return stored_choice(
                    stored,
                    weighed,
                    self._group.size,
                    rates,
                    choose_here,
                    rules=self._rules_given,
                    placements=placements,
                    memory_bytes=limit,
                )
            except PlanError as error:
                if limit is None or self._num_stages == 1:
                    raise
                raise PlanError(
                    f"{error} The limit is that of {self._num_stages} ranks along pp together; more of them help, too."
                ) from None

        def chosen() -> DivisionChoice:
            choice = cheapest()
            if priced is None:
                return choice
            there = choice_in(layout, choice, held=held, placements=placements)
            # A cast has fewer strategies than an operation that changes nothing, so only the shards of
            # parameters are as in training.
            if there is None:
                other = choose(layout, self._group.size, self.rates, held=partition(choice).held)
                there = choice_in(layout, other, held=held, placements=placements)
            return there or choose(layout, self._group.size, self.rates, held=held, placements=placements)

        mine = self._resized_choice(layout, held)
        if mine is None:
            with self._timings.of("choosing a division"):
                choice = on_rank_0(group, chosen, CaptureError)
            numbers: list[int] = share(group, numbers_of_choice(choice) if choice else None)
            mine = choice or choice_of_numbers(
                layout, self._group.size, numbers, held=held, placements=placements
            )
            self._choices.append(mine)
        self.newest = mine
        with self._timings.of("dividing"):
            divided = partition(mine)
            own = divided.of(self._group.rank)
            names = hashlib.sha256(" ".join(node.name for node in own.program.nodes).encode()).hexdigest()
            digest = digest_of_choice(mine)
        hashes = collect(group, (digest, names))
        if any(each != hashes[0] for each in hashes):
            raise CaptureError(
                "Ranks divided the same program differently. Use one version of meshloom, scipy and torch on all ranks."
            )
        if self._first is None:  # later programs are divided as it is
            self._first, self._held = divided, divided.held
        return own.program, own.routed

    def _resized_choice(self, layout: Layout, held: Held | None) -> DivisionChoice | None:
        """The choice for this program at other sizes, found equally on every rank."""
        if held is None:
            return None
        for number, each in enumerate(self._choices):
            if not alike(each.layout.program, layout.program):
                continue
            if number not in self._choices_in_held:
                self._choices_in_held[number] = choice_in(each.layout, each, held=held)
            known = self._choices_in_held[number]
            resized = choice_resized(layout, known, held=held) if known is not None else None
            if resized is not None:
                return resized
        return None


def _without_unused_shards(program: Program, held: Held) -> Program:
    """The program without parameters that it does not use, as on another way through the loss, and of which ranks hold
    shards: where nothing reads a parameter, nothing says how it can be divided."""
    used = {ref.name for node in program.nodes for ref in node.operands()}
    used |= {ref.name for ref in refs_in((program.outputs, tuple(program.updates.values())))}
    kept = {
        name: each
        for name, each in program.parameters.items()
        if each.value in used or name not in held or held[name][0].is_whole
    }
    return program if len(kept) == len(program.parameters) else replace(program, parameters=kept)


def stored_choice(
    stored: ProgramCache | None,
    layout: Layout,
    num_ranks: int,
    rates: Rates,
    choose: Callable[[], DivisionChoice],
    *,
    rules: Mapping[str, str],
    placements: Mapping[str, str] | None,
    memory_bytes: float | None,
) -> DivisionChoice:
    """The choice that an earlier run stored for an equal program, plan and rates, or that of `choose`,
    which is then stored. rules, placements, memory_bytes: what it depends on besides."""
    if stored is None:
        return choose()
    parts = {
        "ranks": num_ranks,
        "rates": rates,
        "rules": sorted(rules.items()),
        "placements": placements,
        "memory": memory_bytes,
    }
    known = stored.choice("division", layout.program, parts)
    if known is not None:
        try:
            known_choice = choice_of_numbers(layout, num_ranks, known["numbers"], placements=placements)
        except (IndexError, ValueError, KeyError, TypeError):  # a file of another origin with this name
            known_choice = None
        if known_choice is not None and digest_of_choice(known_choice) == known.get("digest"):
            return replace(known_choice, seconds=known["seconds"], is_proved=known["proved"])
    choice = choose()
    numbers = {
        "numbers": numbers_of_choice(choice),
        "digest": digest_of_choice(choice),
        "seconds": choice.seconds,
        "proved": choice.is_proved,
    }
    stored.keep_choice("division", layout.program, parts, numbers)
    return choice
