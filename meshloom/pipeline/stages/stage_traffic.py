"""Bytes that stages of a pipeline send in a step: values forward, their gradients back, and along tp.

R4.2: of s values per sample between two stages and b samples, s b go forward; as many gradients come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshloom.pipeline.stages.stages import Crossing, Stage
from meshloom.tensor_parallel.sent_bytes import SentCollective, sent_in_chunk


@dataclass(frozen=True, kw_only=True)
class StageTraffic:
    """From `source` to `destination`, stages or ranks. forward_bytes go there, backward_bytes come back."""

    source: int
    destination: int
    forward_bytes: int
    backward_bytes: int

    @property
    def num_bytes(self) -> int:
        """In both directions."""
        return self.forward_bytes + self.backward_bytes


def traffic_of_stages(microbatches: Iterable[Iterable[Crossing]]) -> tuple[StageTraffic, ...]:
    """Traffic between stages in a step. microbatches: of each, `Stage.incoming` of all stages."""
    found: dict[tuple[int, int], list[int]] = {}
    for crossings in microbatches:
        for each in crossings:
            both = found.setdefault((each.source, each.destination), [0, 0])
            both[0] += each.num_bytes
            both[1] += each.num_bytes * each.meta.requires_grad
    return tuple(
        StageTraffic(source=source, destination=destination, forward_bytes=there, backward_bytes=back)
        for (source, destination), (there, back) in sorted(found.items())
    )  # fmt: skip


def traffic_of_ranks(
    microbatches: Iterable[Iterable[Crossing]], ranks: Sequence[int]
) -> tuple[StageTraffic, ...]:
    """The same between the ranks along pp that hold the stages, without messages to self. ranks: by stage."""
    between_ranks = [
        [replace(each, source=ranks[each.source], destination=ranks[each.destination]) for each in crossings]
        for crossings in microbatches
    ]
    return tuple(each for each in traffic_of_stages(between_ranks) if each.source != each.destination)


def sent_by_rank(traffic: Iterable[StageTraffic], rank: int) -> int:
    """Bytes that one rank sends: outputs of its stages forward, gradients of its inputs back."""
    return sum(
        each.forward_bytes * (each.source == rank) + each.backward_bytes * (each.destination == rank)
        for each in traffic
    )


def sent_over_tp(stages: Iterable[Stage], rank: int) -> Counter[str]:
    """Kind of collective -> bytes that a rank along tp sends. stages: as often as it runs each."""
    found = Counter[str]()
    known: dict[int, list[SentCollective]] = {}  # of each stage once: microbatches of one shape share it
    for stage in stages:
        if id(stage) not in known:
            known[id(stage)] = sent_in_chunk(stage.program, rank)
        for each in known[id(stage)]:
            found[each.collective] += each.num_bytes
    return found
