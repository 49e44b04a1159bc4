"""The cost of any interval of a program's operators as one stage.

Operators are in eager's order. A place is the number of operators before it. Most costs of a stage are no
sums over its operators: what several of them use (a tied parameter, a received value, a mask) exists once.
Such an item is a span: it counts in stages that start in some range of places and reach far enough.

    uses of a parameter      .   x   .   .   x   .        counts in stages that start at 0 or 1 and end after the first x,
    places                 0   1   2   3   4   5   6      and in those that start at 2, 3 or 4 and end after the second
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy

from meshloom.pipeline.stages.stages import computed_from_batch, updating
from meshloom.program.cost.cost import SavedTensor
from meshloom.program.cost.program_seconds import Seconds
from meshloom.program.ir.nodes import Meta, lists_in, refs_in
from meshloom.program.ir.program import Program


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage and one microbatch.

    module, last_module: where it begins and ends. forward_seconds, backward_seconds: of computation.
    later_seconds: the deferrable part of the backward. parameters: elements. parameter_bytes: of these.
    state_bytes: with gradients and optimizer state, and buffers. What several stages use counts in each.
    kept_bytes: activations held from forward to backward, including received values.
    sent_bytes: outgoing values, each once. returned_bytes: their gradients, which come back.
    handed_back_bytes: gradients of incoming values, which are sent back.
    """

    module: str
    last_module: str
    forward_seconds: float
    backward_seconds: float
    later_seconds: float
    parameters: int
    parameter_bytes: int
    state_bytes: int
    kept_bytes: int
    sent_bytes: int
    returned_bytes: int
    handed_back_bytes: int

    @property
    def seconds(self) -> float:
        """Of computation, forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """The costs of all stages that end at one place and start at `first` or later; arrays are [start -
    first].

    takes: seconds, with communication. moved_bytes: at both ends, in both directions.
    """

    first: int
    forward: numpy.ndarray
    backward: numpy.ndarray
    later: numpy.ndarray
    takes: numpy.ndarray
    moved_bytes: numpy.ndarray
    state_bytes: numpy.ndarray
    kept_bytes: numpy.ndarray
    handed_back: numpy.ndarray
    sent: numpy.ndarray
    returned: numpy.ndarray


class Intervals:
    """The intervals of one program. kept: node -> what autograd saves for it. state_factor: bytes held for
    each byte of a trained parameter.

    places: where the program may be cut. Excluded are places where a tuple or a number would be sent, where
        an updated buffer is used on both sides, and where a stage would compute nothing.
    uses: parameter or buffer -> the numbers of the operators that use it, in order; values computed from the
        batch alone count as part of their users.
    """

    def __init__(
        self,
        program: Program,
        work: Mapping[str, Seconds],
        kept: Mapping[str, Sequence[SavedTensor]],
        *,
        link_bytes_per_second: float = math.inf,
        state_factor: float = 1.0,
        pinned: Collection[str] = (),
    ) -> None:
        self.program = program
        self._speed = link_bytes_per_second
        nodes = program.nodes
        self.num_nodes = len(nodes)
        self._at = {node.name: number for number, node in enumerate(nodes)}
        self._free = computed_from_batch(program, pinned)
        self._lists = lists_in(nodes)
        self._users = self._users_of_values()
        state = {each.value: name for name, each in (*program.parameters.items(), *program.buffers.items())}
        self.uses = {name: self._users[value] for value, name in state.items() if self._users.get(value)}
        own = [work[node.name] if node.name not in self._free else Seconds() for node in nodes]
        self._forward = _sums([each.forward for each in own])
        self._backward = _sums([each.backward for each in own])
        self._later = _sums([each.later for each in own])
        # [place], of operators before it, without those that every stage computes for itself
        self.seconds = self._forward + self._backward
        self._again = self._spans((self._users[name], work[name].forward) for name in self._free)
        self._bytes = {name: _state_bytes(program, name, state_factor) for name in self.uses}
        trained = [name for name in self.uses if name in program.parameters]
        using = {use for name in trained for use in self.uses[name]}
        # [place], of operators before it that use parameters
        self.using_parameters = _sums([number in using for number in range(self.num_nodes)])
        self._parameters = _Used((self.uses[name], program.parameters[name].meta) for name in trained)
        self._state = self._spans((uses, self._bytes[name]) for name, uses in self.uses.items())
        self._kept = self._spans_of_kept(kept)
        self._received, self._handed_back = _Spans(), _Spans()
        self._sent, self._returned = _Spans(), _Spans()
        self._add_crossings()
        self.places = self._places()
        self.until = lru_cache(128)(self._until)  # searches revisit few of them
        self.stage = lru_cache(16384)(self._stage)  # several plans try the same ones

    def _until(self, end: int, first: int = 0) -> Row:
        """All stages that end at a place and start at `first` or later."""
        received, handed_back = self._received.until(end, first), self._handed_back.until(end, first)
        sent, returned = self._sent.until(end, first), self._returned.until(end, first)
        starts = slice(first, end + 1)
        forward = self._forward[end] - self._forward[starts] + self._again.until(end, first)
        backward = self._backward[end] - self._backward[starts]
        moved = received + handed_back + sent + returned
        return Row(
            first=first,
            forward=forward,
            backward=backward,
            later=self._later[end] - self._later[starts],
            takes=forward + backward + moved / self._speed,
            moved_bytes=moved,
            state_bytes=self._state.until(end, first),
            kept_bytes=self._kept.until(end, first) + received,
            handed_back=handed_back,
            sent=sent,
            returned=returned,
        )

    def _stage(self, start: int, end: int) -> StageCost:
        """The stage between two places."""
        row = self.until(end, start)
        parameters, parameter_bytes = self._parameters.within(start, end)
        return StageCost(
            module=self._first_path(range(start, end)),
            last_module=self._first_path(range(end - 1, start - 1, -1)),
            forward_seconds=float(row.forward[0]),
            backward_seconds=float(row.backward[0]),
            later_seconds=float(row.later[0]),
            parameters=parameters,
            parameter_bytes=parameter_bytes,
            state_bytes=round(row.state_bytes[0]),
            kept_bytes=round(row.kept_bytes[0]),
            sent_bytes=round(row.sent[0]),
            returned_bytes=round(row.returned[0]),
            handed_back_bytes=round(row.handed_back[0]),
        )

    def bounds(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """[stage], the places where it starts and ends."""
        return list(pairwise([0, *cuts, self.num_nodes]))

    def _first_path(self, numbers: Iterable[int]) -> str:
        """The first module that computes something."""
        found = (self.program.nodes[number] for number in numbers)
        return next((node.path for node in found if node.path and node.name not in self._free), "")

    def shared_bytes(self, bounds: Sequence[tuple[int, int]]) -> float:
        """Bytes of parameters with state that several of these stages use, for each use after the first:
        on one rank they exist once."""
        if len(bounds) < 2:
            return 0.0
        extra = 0.0
        for name, uses in self.uses.items():
            times = sum(any(start <= use < end for use in uses) for start, end in bounds)
            extra += max(times - 1, 0) * self._bytes[name]
        return extra

    def _users_of_values(self) -> dict[str, list[int]]:
        """Value -> operators that use it, in order. Values computed from the batch alone count as part of
        their users, since these compute them."""
        nodes = self.program.nodes
        users: dict[str, set[int]] = {node.name: set() for node in nodes}
        for ref in refs_in(self.program.outputs):
            users.setdefault(ref.name, set()).add(len(nodes) - 1)
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            found = users[node.name] if node.name in self._free else {number}
            for ref in node.operands():
                users.setdefault(ref.name, set()).update(found)
        return {name: sorted(found) for name, found in users.items()}

    def _spans(self, things: Iterable[tuple[Sequence[int], float]]) -> _Spans:
        spans = _Spans()
        for uses, size in things:
            spans.add_uses(uses, size)
        return spans

    def _spans_of_kept(self, kept: Mapping[str, Sequence[SavedTensor]]) -> _Spans:
        """Saved tensors in the stages that compute them; a later stage saves what it received instead."""
        program = self.program
        variables = (*program.parameters.values(), *program.buffers.values(), *program.inputs)
        given = {*program.constants, *(each.value for each in variables)}
        keepers: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for number, node in enumerate(program.nodes):
            for each in kept.get(node.name, ()):
                if each.memory not in given:
                    keepers.setdefault(each.memory, []).append(number)
                    sizes[each.memory] = each.num_bytes
        spans = _Spans()
        for memory, numbers in keepers.items():
            owner = memory.partition(":")[0]
            if owner in self._free:
                spans.add_uses(numbers, sizes[memory])
            else:
                first = min(self._at.get(owner, numbers[0]), numbers[0])
                spans.add(-1, first, numbers[0], sizes[memory])
        return spans

    def _add_crossings(self) -> None:
        for name, number in self._at.items():
            outputs = self.program.nodes[number].outputs
            uses = [each for each in self._users[name] if each > number]
            if name in self._free or not uses or name in self._lists:
                continue
            size = outputs[0].num_bytes
            directions = [(self._received, self._sent)]
            if outputs[0].requires_grad:
                directions.append((self._handed_back, self._returned))
            for received, sent in directions:
                received.add_uses(uses, size, produced_at=number)
                sent.add(-1, number, number, size)  # it is sent by the stage that computes it ...
                sent.add(-1, number, uses[-1], -size)  # ... unless its last use is in that stage

    def _places(self) -> list[int]:
        nodes = self.program.nodes
        legal = numpy.ones(len(nodes) + 1, dtype=bool)
        for name, number in self._at.items():
            uses = self._users[name]
            if name not in self._free and uses and name in self._lists:
                legal[number + 1 : uses[-1] + 1] = False
        for together in updating(self.program).values():
            places = [self._at[name] for name in together]
            legal[min(places) + 1 : max(places) + 1] = False
        own = _sums([float(node.name not in self._free) for node in nodes])
        legal &= (own > 0) & (own < own[-1])
        return [int(place) for place in numpy.flatnonzero(legal)]


class _Spans:
    """Items that count in stages [start, end) with after < start <= upto and end > when; upto <= when."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, int, float]] = []  # when, after, upto, size
        self._columns: tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray] | None = None

    def add(self, after: int, upto: int, when: int, size: float) -> None:
        """Adds a span."""
        assert upto <= when
        self._found.append((when, after, upto, size))

    def add_uses(self, uses: Sequence[int], size: float, *, produced_at: int = -1) -> None:
        """Adds an item that exists once in every stage that uses it and was not computed there."""
        for before, use in pairwise((produced_at, *uses)):
            self.add(before, use, use, size)

    def until(self, end: int, first: int) -> numpy.ndarray:
        """[start - first]: the sum over the items that count in stages ending at `end`. The time is linear
        in the length of the stages."""
        if self._columns is None:
            when, after, upto, size = numpy.array(sorted(self._found), dtype=float).reshape(-1, 4).T
            self._columns = when.copy(), after.astype(int), upto.astype(int), size.copy()
        when, after, upto, size = self._columns
        # items that end before `first` count in none of them
        some = slice(*numpy.searchsorted(when, (first, end)))
        length = end - first + 2
        change = numpy.bincount(numpy.maximum(after[some] + 1 - first, 0), size[some], length)
        change -= numpy.bincount(numpy.maximum(upto[some] + 1 - first, 0), size[some], length)
        return numpy.cumsum(change[:-1])


class _Used:
    """Parameters, each with the numbers of the operators that use it, in order."""

    def __init__(self, things: Iterable[tuple[Sequence[int], Meta]]) -> None:
        uses = sorted(
            (use, before, math.prod(meta.shape), meta.num_bytes)
            for each, meta in things
            for before, use in pairwise((-1, *each))
        )
        columns = numpy.array(uses, dtype=numpy.int64).reshape(-1, 4).T
        self._use, self._before, self._elements, self._bytes = map(numpy.ascontiguousarray, columns)

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Elements and bytes of the parameters that operators [start, end) use, each once."""
        first, last = numpy.searchsorted(self._use, (start, end))
        counts = self._before[first:last] < start
        return int(self._elements[first:last][counts].sum()), int(self._bytes[first:last][counts].sum())


def _state_bytes(program: Program, name: str, factor: float) -> float:
    parameter = program.parameters.get(name)
    if parameter is None:
        return program.buffers[name].meta.num_bytes
    return parameter.meta.num_bytes * (factor if parameter.meta.requires_grad else 1.0)


def _sums(values: Sequence[float]) -> numpy.ndarray:
    return numpy.concatenate([[0.0], numpy.cumsum(values)])
