"""Gradients in flat buckets, each of which can be sent as soon as it and those before it are complete.

    backward ->  head.weight  blocks.1...   | blocks.0...            | embedding.weight
                 bucket 0: complete, sent     bucket 1: filling        bucket 2: empty

All ranks start buckets in one order, or collectives would not match: in the first step the reverse order of
the model's parameters, then the order in which rank 0's backward completed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.windows import Extent, next_start, separate
from meshloom.core.errors import TrainingError
from meshloom.core.step_shape import StepShape
from meshloom.core.units import round_up
from meshloom.program.operators.fused_grad_accumulation import GradBuffer, add_gradient
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

FIRST_BUCKET_BYTES = 2**20  # small, so that the first bucket leaves early


@dataclass
class BucketEntry:
    """A parameter's place in its bucket: elements `start` to `stop`."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    arrived: bool = False  # a gradient arrived in this step
    counted: bool = False  # it arrived in the last chunk


class BucketLayout(Protocol):
    """Which gradients lie where in a flat tensor of `extent`, whether or not there is one. number: its index
    among all. length: elements before the padding."""

    @property
    def number(self) -> int: ...
    @property
    def entries(self) -> Sequence[BucketEntry]: ...
    @property
    def length(self) -> int: ...
    @property
    def extent(self) -> Extent: ...


@dataclass
class Bucket:
    """A flat tensor of gradients: `length` elements, padded with zeros to the length of `flat`. number: its
    index in `GradientBuckets.buckets`."""

    number: int
    entries: list[BucketEntry]
    flat: Tensor
    length: int
    missing: int = 0
    started: bool = False
    views: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        self.views = [
            self.flat[entry.start : entry.stop].view(entry.parameter.shape) for entry in self.entries
        ]

    @property
    def extent(self) -> Extent:
        """Of `flat`."""
        return Extent(num_elements=self.flat.numel(), dtype=self.flat.dtype, device=self.flat.device)


class GradientBuckets:
    """Accumulates gradients over chunks and passes each complete bucket to `start`, in one order on all
    ranks.

    named: the trainable parameters. bucket_bytes: the size at which a bucket is closed. multiple: every
    bucket's length is a multiple of it. num_extra: of the number of entries, the number of elements added for
    the exchange's own use. overlap: start buckets during the last chunk's backward, not only in `start_rest`.
    replicated: names of parameters that are replicated over other groups of ranks. They share no bucket with
    others, so that their buckets have the same layout in all groups and sums and updates have the same bits.
    in_order: parameters are in the order of `named`, as ranks along tp need it, which gather them together and have shards of
    other sizes. allocate: allocates the buckets' flat tensors, filled with zeros.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        bucket_bytes: int,
        start: Callable[[Bucket], None],
        overlap: bool = True,
        multiple: int = 1,
        num_extra: Callable[[int], int] = lambda num_entries: 0,
        replicated: Collection[str] = (),
        in_order: bool = False,
        allocate: Callable[[Sequence[Extent]], list[Tensor]] = separate,
    ) -> None:
        grouped = group_parameters(named, bucket_bytes, replicated)
        if multiple > 1 and not in_order:  # ranks own shares of buckets
            grouped = list(map(spread, grouped))
        of_buckets = list(map(entries_of, grouped))
        flats = allocate([extent_of(each, multiple, num_extra(len(each))) for each in of_buckets])
        self.buckets = [
            Bucket(number, entries, flat, entries[-1].stop)
            for number, (entries, flat) in enumerate(zip(of_buckets, flats, strict=True))
        ]
        self._place = {
            id(entry.parameter): (bucket, entry, view)
            for bucket in self.buckets
            for entry, view in zip(bucket.entries, bucket.views, strict=True)
        }
        self._ready = {number: self._ready_of(*place) for number, place in self._place.items()}
        self._start = start
        self._overlap = overlap
        self._order = list(range(len(self.buckets)))
        self._completed: list[int] = []  # as observed in this step's last chunk
        self._next = 0
        self._left = 0  # chunks of this step whose backward has not ended
        self.order_is_shared = False

    def begin(self, shape: StepShape) -> None:
        """Discards all gradients; buckets are not written before one arrives."""
        for bucket in self.buckets:
            bucket.missing, bucket.started = len(bucket.entries), False
            for entry in bucket.entries:
                entry.arrived = entry.counted = False
                entry.parameter.grad = None
        self._completed, self._next = [], 0
        self._left = shape.chunks or 1  # a pipeline's end as one

    def end_chunk(self) -> None:
        """In the last one complete buckets may start."""
        self._left -= 1

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        """The parameter's place in its bucket; None if it has none, or the bucket has been sent."""
        place = self._place.get(id(parameter))
        if place is None or place[0].started:
            return None
        _, entry, view = place
        return GradBuffer(tensor=view, filled=entry.arrived)

    def hook(self, parameter: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """What moves `parameter.grad`, if there is one, into its bucket, unless it is there already. In the
        last chunk the gradient is then complete."""
        return self._ready[id(parameter)]

    def _ready_of(self, bucket: Bucket, entry: BucketEntry, view: Tensor) -> Callable[[nn.Parameter], None]:
        def ready(
            parameter: nn.Parameter,
        ) -> None:  # called for every parameter in every step, so each access counts
            gradient = parameter.grad
            if gradient is not None:
                if bucket.started:
                    raise arrived_again(entry)
                if entry.arrived or gradient is view or gradient.layout is not torch.strided:
                    add_gradient(view, gradient, filled=entry.arrived)
                else:
                    view.copy_(gradient)
                parameter.grad = None
                entry.arrived = True
            if self._left <= 1 and entry.arrived and not entry.counted:
                entry.counted = True
                bucket.missing -= 1
                if not bucket.missing:
                    self._completed.append(bucket.number)
                    if self._overlap:
                        self._start_complete()

        return ready

    def start_rest(self) -> None:
        """Starts all other buckets, with gradients that were not reported as ready; those without gradient
        are zero."""
        for bucket in self.buckets:
            for entry in bucket.entries:
                if entry.parameter.grad is not None:
                    self._ready[id(entry.parameter)](entry.parameter)
        while self._next < len(self._order):
            self._start_next()

    def share_order(self, group: Group) -> None:
        """After the first step, once: adopts the order in which rank 0's backward completed the buckets."""
        self.order_is_shared = True
        order = [
            *self._completed,
            *(index for index in range(len(self.buckets)) if index not in self._completed),
        ]
        self._order = order_of_rank_0(order, group, self.buckets[0].flat.device)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes of `share_order`."""
        return ExpectedBytes(once=Traffic.along("dp", broadcast=8 * len(self.buckets)))

    def _start_complete(self) -> None:
        while self._next < len(self._order) and not self.buckets[self._order[self._next]].missing:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[self._order[self._next]]
        self._next += 1
        for entry, view in zip(bucket.entries, bucket.views, strict=True):
            if not entry.arrived:
                view.zero_()
        bucket.started = True
        self._start(bucket)


def arrived_again(entry: BucketEntry) -> TrainingError:
    """A gradient that can no longer be sent in this step."""
    return TrainingError(
        f"The gradient of {entry.name} arrived again after it had been sent (re-entrant checkpointing does this). "
        "Use overlap=false in the plan."
    )


def order_of_rank_0(order: Sequence[int], group: Group, device: torch.device) -> list[int]:
    """What rank 0 of the group passes; as many numbers on all ranks."""
    decided = torch.tensor(order, dtype=torch.int64, device=device)
    group.broadcast(decided, 0).wait()
    return decided.tolist()


def group_parameters(
    named: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int, *apart: Collection[str]
) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters in reverse order, in buckets of one dtype and device each; float64 counts half its bytes. apart: sets of names that
    share no bucket with others."""
    kinds: dict[tuple[torch.dtype, torch.device, tuple[bool, ...]], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(named):
        kind = (parameter.dtype, parameter.device, tuple(name in names for names in apart))
        kinds.setdefault(kind, []).append((name, parameter))
    groups: list[list[tuple[str, nn.Parameter]]] = []
    for alike in kinds.values():
        # verification in float64 has the buckets of float32
        sizes = [each.nbytes // (1 + (each.dtype == torch.float64)) for _, each in alike]
        ends = accumulate(bucket_lengths(sizes, bucket_bytes), initial=0)
        groups += [alike[start:stop] for start, stop in pairwise(ends)]
    return groups


def spread(named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """The same, in an order in which even shares of the elements are of about as many parameters each: the update of
    a rank's share takes time for elements and for parameters.

    >>> sizes = {"a": 9, "b": 9, "c": 1, "d": 1, "e": 1, "f": 1}
    >>> "".join(name for name, _ in spread([(name, nn.Parameter(torch.ones(n))) for name, n in sizes.items()]))
    'bcdeaf'
    """
    by_size = deque(sorted(named, key=lambda each: each[1].numel()))
    mean = sum(each.numel() for _, each in named) / len(named)
    found: list[tuple[str, nn.Parameter]] = []
    ahead = 0.0  # elements so far, less those of as many parameters of the mean size
    while by_size:
        found.append(by_size.pop() if ahead <= 0 else by_size.popleft())
        ahead += found[-1][1].numel() - mean
    return found


def bucket_lengths(sizes: Sequence[int], bucket_bytes: int) -> list[int]:
    """The number of consecutive parameters in each bucket, if they have these sizes in bytes.

    >>> bucket_lengths([3, 3, 3, 9, 1], 5)
    [2, 2, 1]
    """
    lengths: list[int] = []
    filled = 0
    for size in sizes:
        limit = min(bucket_bytes, FIRST_BUCKET_BYTES) if len(lengths) == 1 else bucket_bytes
        if not lengths or filled >= limit:
            lengths.append(0)
            filled = 0
        lengths[-1] += 1
        filled += size
    return lengths


def extent_of(entries: Sequence[BucketEntry], multiple: int, num_extra: int = 0) -> Extent:
    """Of a bucket with these entries."""
    first, length = entries[0].parameter, entries[-1].stop + num_extra
    return Extent(num_elements=round_up(length, multiple), dtype=first.dtype, device=first.device)


def entries_of(named: Sequence[tuple[str, nn.Parameter]]) -> list[BucketEntry]:
    """Of a bucket of these parameters, one after another."""
    entries: list[BucketEntry] = []
    for name, parameter in named:
        start = next_start(entries[-1].stop if entries else 0, parameter)
        entries.append(BucketEntry(name, parameter, start, start + parameter.numel()))
    return entries


def gaps_of(entries: Sequence[BucketEntry], num_elements: int) -> list[tuple[int, int]]:
    """The elements of a flat tensor that are no parameter's: those from the first to before the second number of each pair."""
    starts = [*(each.start for each in entries[1:]), num_elements]
    return [(entry.stop, start) for entry, start in zip(entries, starts, strict=True) if entry.stop < start]
