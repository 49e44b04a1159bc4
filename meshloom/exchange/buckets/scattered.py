"""Gradients of which a rank keeps its slices only: buckets are reduce-scattered chunk after chunk, in memory
that other buckets then take.

    backward of a chunk ->    blocks.2...      blocks.1...      blocks.0...         of all chunks
    pool of 2 buckets         [ bucket 0 ] ->  [ bucket 1 ] ->  [ bucket 2 ] ->     slice 0, slice 1, slice 2
                              memory A         memory B         memory A, once bucket 0 has been sent

A *round* of a bucket is one reduce-scatter. Every bucket has as many as a replica has chunks, on all ranks: a
rank with fewer chunks takes part with zeros. Sums over ranks are added up in the order of rounds.

All ranks start rounds in one order: in the first step the reverse order of the model's parameters, round
after round, then the order in which rank 0's backward completed them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group
from meshloom.comm.windows import Extent, Windows, separate
from meshloom.core.step_shape import StepShape
from meshloom.exchange.buckets.buckets import (
    arrived_again,
    entries_of,
    extent_of,
    gaps_of,
    group_parameters,
    order_of_rank_0,
)
from meshloom.exchange.buckets.rounds import BucketPlace, RoundsUnderWay, ScatteredBucket
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class ScatteredBuckets:
    """The buckets of `named` over `group`.

    rounds: chunks of a step. overlap: reduce-scatter during backward; otherwise between backwards, and wait.
    replicated, bucket_bytes: as for `GradientBuckets`. late: names of parameters whose gradients are complete
    at the end of a step only. windows: `group`, if its ranks can share memory, where the pool then lies.
    travels: what gradients travel as; None: their own dtype.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        rounds: int,
        bucket_bytes: int,
        overlap: bool,
        replicated: Collection[str] = (),
        late: Collection[str] = (),
        windows: Windows | None = None,
        travels: torch.dtype | None = None,
    ) -> None:
        self._group, self._overlap = group, overlap
        self._travelling = TravellingSums(group, travels)
        self.buckets: list[ScatteredBucket] = []
        self._place: dict[int, BucketPlace] = {}
        for number, part in enumerate(group_parameters(named, bucket_bytes, replicated, late)):
            self._add_bucket(number, part, rounds, part[0][0] in late)
        self._rounds = RoundsUnderWay(self.buckets, group, windows, bucket_bytes, self._travelling)
        self._chunk: int | None = None  # chunks that have ended; None: the caller does not say
        self._order = [
            each.number for round_ in range(rounds) for each in self.buckets if round_ < each.rounds
        ]
        self._completed: list[int] = []  # as observed in this step
        self._next = 0
        self._left = 0  # chunks of this step whose backward has not ended
        self.order_is_shared = False

    def begin(self, shape: StepShape) -> None:
        """Discards all gradients."""
        self._rounds.begin(waits=shape.may_wait)
        for bucket in self.buckets:
            bucket.flat, bucket.views, bucket.sent = None, [], 0
            for place in bucket.places:
                place.chunks, place.filled, place.entry.arrived = 0, False, False
                place.entry.parameter.grad = None
            bucket.count()
        self._completed, self._next = [], 0
        self._chunk, self._left = 0 if shape.chunks else None, shape.chunks or 1

    def end_chunk(self) -> None:
        """The chunk's round of all buckets starts; after the last chunk all other rounds, with gradients that
        were not reported as ready. Those without gradient are zero."""
        if self._chunk is not None:
            self._chunk += 1
            for place in self._place.values():
                self._count(place, self._chunk)
            self._start_complete(rest=True)
        self._left -= 1
        if not self._left:
            self._start_all()

    def start_rest(self) -> None:
        """Starts what has not been, and checks that all gradients have been sent."""
        self._start_all()
        late = next((each for each in self._place.values() if each.entry.parameter.grad is not None), None)
        if late is not None:
            raise arrived_again(late.entry)

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        """The parameter's place in the memory that its bucket has now; None if it has none, or all has been
        sent."""
        place = self._place.get(id(parameter))
        if place is None or place.bucket.late or place.bucket.sent == place.bucket.rounds:
            return None
        self._rounds.open(place.bucket)
        return GradBuffer(tensor=place.view, filled=place.filled)

    def hook(self, parameter: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """What moves `parameter.grad`, if there is one, into its bucket. The chunk's gradient is then
        complete; where chunks end one after another, only if there is one."""
        return partial(self._ready, self._place[id(parameter)])

    def _ready(self, place: BucketPlace, parameter: nn.Parameter) -> None:
        has_gradient = parameter.grad is not None
        if self._chunk is not None and not self._overlap:
            return
        if has_gradient:
            rounds = place.bucket.rounds
            if place.bucket.sent >= (rounds if self._chunk is None else min(rounds, self._chunk + 1)):
                raise arrived_again(place.entry)
            self._move(place)
        if self._chunk is None:
            self._count(place, place.chunks + 1)
        elif has_gradient:
            self._count(place, self._chunk + 1)
        self._start_complete()

    def collect(self) -> list[Tensor]:
        """Waits for all rounds; this rank's slice [n] of each bucket's sum."""
        self._rounds.end()
        return [bucket.sum for bucket in self.buckets]

    def share_order(self, group: Group) -> None:
        """After the first step, once: adopts the order in which rank 0's backward completed the rounds."""
        self.order_is_shared = True
        order, rest = list(self._completed), list(self._order)
        for number in order:
            rest.remove(number)
        self._order = order_of_rank_0([*order, *rest], group, self.buckets[0].extent.device)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes of all rounds, and of `share_order`."""
        num_bytes = sum(
            each.rounds * self._travelling.num_bytes(each.extent.num_elements, each.extent.dtype)
            for each in self.buckets
        )
        return ExpectedBytes(
            once=Traffic.along("dp", broadcast=8 * len(self._order)),
            per_step=Traffic.along("dp", reduce_scatter=num_bytes),
        )

    def _add_bucket(
        self, number: int, named: Sequence[tuple[str, nn.Parameter]], rounds: int, late: bool
    ) -> None:
        entries = entries_of(named)
        extent = extent_of(entries, self._group.size)
        share = Extent(
            num_elements=extent.num_elements // self._group.size, dtype=extent.dtype, device=extent.device
        )
        bucket = ScatteredBucket(
            number=number,
            entries=entries,
            length=entries[-1].stop,
            extent=extent,
            gaps=gaps_of(entries, extent.num_elements),
            sum=separate([share])[0],
            rounds=1 if late else rounds,
            late=late,
        )
        bucket.places = [BucketPlace(bucket, index, entry) for index, entry in enumerate(entries)]
        self._place |= {id(place.entry.parameter): place for place in bucket.places}
        self.buckets.append(bucket)

    def _count(self, place: BucketPlace, chunks: int) -> None:
        """So many chunks' gradients of a parameter are complete."""
        bucket, before = place.bucket, place.chunks
        place.chunks = max(before, min(chunks, bucket.rounds))
        if before <= bucket.sent < place.chunks:
            bucket.missing -= 1
            if not bucket.missing:
                self._completed.append(bucket.number)

    def _move(self, place: BucketPlace) -> None:
        parameter = place.entry.parameter
        assert parameter.grad is not None
        self._rounds.open(place.bucket)
        GradBuffer(tensor=place.view, filled=place.filled).add(parameter.grad)
        parameter.grad = None
        place.filled = place.entry.arrived = True

    def _start_complete(self, *, rest: bool = False) -> None:
        while self._next < len(self._order) and self.buckets[self._order[self._next]].is_complete:
            self._start_next(rest=rest)

    def _start_all(self) -> None:
        while self._next < len(self._order):
            self._start_next(rest=True)

    def _start_next(self, *, rest: bool) -> None:
        """rest: gradients that were not reported belong to this round."""
        bucket = self.buckets[self._order[self._next]]
        self._next += 1
        self._rounds.open(bucket)
        assert bucket.flat is not None
        for place, view in zip(bucket.places, bucket.views, strict=True):
            gradient = place.entry.parameter.grad
            # one that accumulates in place goes with the memory that it is in
            if gradient is not None and (rest or gradient is view):
                self._move(place)
            if not place.filled:
                view.zero_()
            place.filled = False
        for first, stop in bucket.gaps:
            bucket.flat[first:stop].zero_()
        self._rounds.start(bucket)
        bucket.count()
        if bucket.is_complete:
            self._completed.append(bucket.number)
        if not self._overlap:
            self._rounds.end()
