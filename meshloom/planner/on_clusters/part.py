"""A rank's part of a model under one size of tp: the seconds and bytes of any of its stages, at any size of a microbatch.

What an operator does is affine in the samples of a microbatch: it is recorded for two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy

from meshloom.clusters.work import OperatorWork, Sent
from meshloom.core.errors import PlanError
from meshloom.pipeline.stages.choose_cuts import choose_cuts, line_of
from meshloom.pipeline.stages.intervals import Intervals
from meshloom.planner.on_clusters.fused_chains import fused
from meshloom.planner.on_clusters.rank_records import Did, NodeRecord, records_of
from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.cost.program_seconds import Seconds
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.recompute.recompute import recomputed

Priced = Callable[[Did], float]  # seconds
MOST_SEARCHED = 16  # stages


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """A stage's microbatch. forward, backward: seconds, with communication along tp, which is `tp` of both; sent, returned: bytes for the
    next stage, and back to this one. kept: bytes from forward to backward. again: the most that is computed again at one time, and the largest
    result of an operator. parameters: their bytes; trained: of those that are trained."""

    forward: float
    backward: float
    tp: float
    tp_bytes: int
    kept: int
    again: int
    sent: int
    returned: int
    parameters: int
    trained: int
    buffers: int

    @property
    def seconds(self) -> float:
        """Of a microbatch, there and back."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class RecordedPart:
    """A rank's program of microbatches of two sizes, and what it does."""

    tp: int
    samples: tuple[int, int]
    programs: tuple[Program, Program]
    records: tuple[Mapping[str, NodeRecord], Mapping[str, NodeRecord]]


def recorded(
    programs: Sequence[Program], samples: tuple[int, int], tp: int, *, compiled: bool = False
) -> RecordedPart:
    """compiled: whether chains of operators run as one. Raises `PlanError` where microbatches of the two sizes do different things."""
    records = [records_of(each, tp=tp) for each in programs]
    if compiled:
        records = [fused(each, found) for each, found in zip(programs, records, strict=True)]
    names = [[(node.name, node.operator.partition("(")[0]) for node in each.nodes] for each in programs]
    did = [
        [tuple(map(_what, (*each.forward, *each.backward))) for each in found.values()] for found in records
    ]
    if names[0] != names[1] or did[0] != did[1]:
        raise PlanError(
            f"Microbatches of {samples[0]} and {samples[1]} samples do other things, so that others cannot be priced from these."
        )
    return RecordedPart(
        tp=tp, samples=samples, programs=(programs[0], programs[1]), records=(records[0], records[1])
    )


class ModelPart:
    """seconds: of what a rank does. rates: for choices of cuts and of what is computed again."""

    def __init__(self, part: RecordedPart, seconds: Priced, rates: Rates) -> None:
        self._programs, self._samples, self._records = part.programs, part.samples, part.records
        self._tp, self._seconds, self._rates = part.tp, seconds, rates
        self._lines: dict[str, tuple[Intervals, Intervals]] = {}
        self._cuts: dict[int, list[tuple[int, int]]] = {}

    @lru_cache(4096)  # noqa: B019 - a part lives as long as its plans are priced
    def stages(self, count: int, samples: int, recompute: str) -> tuple[StageWork, ...]:
        """Of `count` stages. Raises `PlanError` where there are too few places to cut."""
        there, back, sent = self._sums(samples, recompute)
        again = self._again(samples, recompute)
        found: list[StageWork] = []
        for start, end in self._bounds(count):
            one, two = (line.stage(start, end) for line in self._line(recompute))
            parameters, trained, buffers = self._held(start, end)
            found.append(
                StageWork(
                    forward=float(there[end] - there[start]), backward=float(back[end] - back[start]),
                    tp=float(sent[0][end] - sent[0][start]), tp_bytes=round(sent[1][end] - sent[1][start]),
                    kept=self._at(one.kept_bytes, two.kept_bytes, samples), again=again,
                    sent=self._at(one.sent_bytes, two.sent_bytes, samples), returned=self._at(one.returned_bytes, two.returned_bytes, samples),
                    parameters=parameters, trained=trained, buffers=buffers,
                )
            )  # fmt: skip
        return tuple(found)

    def flops(self, samples: int) -> int:
        """Of a microbatch on one rank, forward and backward, without what is computed again."""
        works = (each for found in self._did(samples) for side in found for each in side)
        return sum(each.flops * each.times for each in works if isinstance(each, OperatorWork))

    def forwards(self, samples: int) -> list[tuple[list[Did], float]]:
        """Of each node, what its forward does, and for how long."""
        return [(there, self._of(there)) for there, _ in self._did(samples)]

    def _bounds(self, count: int) -> list[tuple[int, int]]:
        """Start and end of each stage: those of the fastest slowest stage; of many, those nearest to equal shares, which take no search."""
        if count not in self._cuts:
            line = self._line("none")[0]
            if count == 1:
                cuts: list[int] = []
            elif count <= MOST_SEARCHED or len(line.places) < count - 1:
                stage_of = choose_cuts(self._programs[0], {}, count, self._rates, line=line).stage_of
                numbers = [stage_of[node.name] for node in self._programs[0].nodes]
                cuts = [numbers.index(stage) for stage in range(1, count)]
            else:
                cuts = _even(line, count)
            self._cuts[count] = list(pairwise([0, *cuts, line.num_nodes]))
        return self._cuts[count]

    def _line(self, recompute: str) -> tuple[Intervals, Intervals]:
        if recompute not in self._lines:
            self._lines[recompute] = self._one_line(0, recompute), self._one_line(1, recompute)
        return self._lines[recompute]

    def _one_line(self, number: int, recompute: str) -> Intervals:
        program, records = self._programs[number], self._records[number]
        work = {
            name: Seconds(forward=self._of(each.forward), backward=self._of(each.backward))
            for name, each in records.items()
        }
        kept: Mapping[str, Sequence[SavedTensor]] = {name: each.kept for name, each in records.items()}
        if recompute != "none":
            found = self._recomputed[recompute][number]
            kept = {name: (SavedTensor(memory=name, num_bytes=size),) for name, size in found.kept_of.items()}
            work |= {
                name: replace(work[name], backward=work[name].backward + work[name].forward)
                for name in found.seconds_of
            }
        return line_of(program, work, kept, self._rates)

    @cached_property
    def _recomputed(self) -> Mapping[str, tuple[Any, Any]]:
        costs = [{name: _cost(each) for name, each in records.items()} for records in self._records]
        found: dict[str, tuple[Any, Any]] = {}
        for how in ("selective", "full"):
            one, two = (
                recomputed(program, each, how, self._rates)
                for program, each in zip(self._programs, costs, strict=True)
            )
            found[how] = (one, two)
        return found

    def _again(self, samples: int, recompute: str) -> int:
        one, two = self._largest
        if recompute != "none":
            one, two = (
                most + each.again_bytes
                for most, each in zip((one, two), self._recomputed[recompute], strict=True)
            )
        return self._at(one, two, samples)

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """Bytes of the largest result of an operator."""
        one, two = (
            max(sum(each.num_bytes for each in node.outputs) for node in program.nodes)
            for program in self._programs
        )
        return one, two

    def _held(self, start: int, end: int) -> tuple[int, int, int]:
        """Bytes of parameters that the nodes use, of those that are trained, and of buffers."""
        program = self._programs[0]
        used = {ref.name for node in program.nodes[start:end] for ref in node.operands()}
        parameters = [each.meta for each in program.parameters.values() if each.value in used]
        trained = sum(each.num_bytes for each in parameters if each.requires_grad)
        buffers = sum(each.meta.num_bytes for each in program.buffers.values() if each.value in used)
        return sum(each.num_bytes for each in parameters), trained, buffers

    def _did(self, samples: int) -> list[tuple[list[Did], list[Did]]]:
        found: list[tuple[list[Did], list[Did]]] = []
        for one, two in zip(*(each.values() for each in self._records), strict=True):
            sides = ((one.forward, two.forward), (one.backward, two.backward))
            there, back = ([self._done(*pair, samples) for pair in zip(*side, strict=True)] for side in sides)
            found.append((there, back))
        return found

    def _at(self, one: int, two: int, samples: int) -> int:
        """Of so many samples."""
        first, second = self._samples
        return one + (two - one) * (samples - first) // (second - first)

    def _done(self, one: Did, two: Did, samples: int) -> Did:
        num_bytes = self._at(one.num_bytes, two.num_bytes, samples)
        if isinstance(one, Sent) or isinstance(two, Sent):
            return replace(one, num_bytes=num_bytes)
        sizes = tuple(self._at(*pair, samples) for pair in zip(one.sizes, two.sizes, strict=True))
        return replace(one, flops=self._at(one.flops, two.flops, samples), num_bytes=num_bytes, sizes=sizes)

    @lru_cache(64)  # noqa: B019 - as above
    def _sums(
        self, samples: int, recompute: str
    ) -> tuple[numpy.ndarray, numpy.ndarray, tuple[numpy.ndarray, numpy.ndarray]]:
        """[place]: seconds of forwards and of backwards before it; seconds and bytes along tp."""
        again = self._recomputed[recompute][0].seconds_of if recompute != "none" else {}
        there: list[float] = []
        back: list[float] = []
        tp: list[float] = []
        sent: list[float] = []
        for name, (forward, backward) in zip(self._records[0], self._did(samples), strict=True):
            did = [*forward, *backward, *(forward if name in again else ())]
            there.append(self._of(forward))
            back.append(self._of(did) - there[-1])
            over_tp = [each for each in did if isinstance(each, Sent)]
            tp.append(self._of(over_tp))
            sent.append(float(sum(self._handed_over(each) for each in over_tp)))
        return _sum(there), _sum(back), (_sum(tp), _sum(sent))

    def _handed_over(self, sent: Sent) -> int:
        """Bytes that a rank gives to it."""
        return sent.times * (
            sent.num_bytes // self._tp if sent.collective == "all_gather" else sent.num_bytes
        )

    def _of(self, did: Sequence[Did]) -> float:
        return sum(map(self._seconds, did))


def _even(line: Intervals, count: int) -> list[int]:
    """The places nearest to equal shares of seconds, each behind the one before."""
    places = numpy.array(line.places)
    seconds = line.seconds[places]
    cuts: list[int] = []
    first = 0
    for stage in range(1, count):
        last = len(places) - (count - 1 - stage)
        share = line.seconds[-1] * stage / count
        first += int(numpy.abs(seconds[first:last] - share).argmin())
        cuts.append(int(places[first]))
        first += 1
    return cuts


def _what(did: Did) -> tuple[Any, ...]:
    return (did.collective,) if isinstance(did, Sent) else (did.kind, did.dtype, len(did.sizes))


def _cost(record: NodeRecord) -> Cost:
    there, back = (
        [each for each in side if isinstance(each, OperatorWork)]
        for side in (record.forward, record.backward)
    )
    return Cost(
        flops=sum(each.flops for each in there), backward_flops=sum(each.flops for each in back),
        read_bytes=0, written_bytes=sum(each.num_bytes for each in there), backward_written_bytes=sum(each.num_bytes for each in back), kept=record.kept,
    )  # fmt: skip


def _sum(values: Sequence[float]) -> numpy.ndarray:
    return numpy.concatenate([[0.0], numpy.cumsum(values)])
