"""Gradients gathered into flat buckets, each of which may travel as soon as it and those before it are
complete.

    backward ->  head.weight  blocks.1...   | blocks.0...            | embedding.weight
                 bucket 0: complete, travels  bucket 1: filling        bucket 2: empty

All ranks start buckets in one order, or collectives would not match: reverse order of the model's parameters
in the
first step, then the order in which rank 0's backward completed them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.comm.windows import Extent, separate
from meshloom.core.errors import TrainingError
from meshloom.program.operators.fused_grad_accumulation import Room
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

FIRST_BUCKET_BYTES = 2**20  # small, so that the first bucket leaves early


@dataclass
class BucketEntry:
    """A parameter's place in its bucket: elements `start` to `stop`."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    arrived: bool = False  # a gradient came in this step
    counted: bool = False  # it came in the last chunk


@dataclass
class Bucket:
    """One flat piece of gradients: `length` elements, zero-padded to the length of `flat`. number: its place
    in `GradientBuckets.buckets`."""

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
    def num_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class GradientBuckets:
    """Adds up gradients chunk by chunk, and hands each complete bucket to `start`, in one order on all ranks.

    named: the trainable parameters. bucket_bytes: size at which a bucket is closed. multiple: the length of
        every
    bucket is a multiple of it. num_extra: of the number of entries, how many elements to add for the
    exchange's own use.
    overlap: start buckets during the last chunk's backward, or only in `start_rest`. apart: names of
    parameters that share no bucket with others: those that other groups of ranks hold too, and lay out alike,
    so that the same sums and updates come out bit by bit.
    allocate: makes the buckets' flat tensors, of zeros.
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
        apart: Collection[str] = (),
        allocate: Callable[[Sequence[Extent]], list[Tensor]] = separate,
    ) -> None:
        grouped = _group(named, bucket_bytes, apart)
        flats = allocate([_extent(entries, multiple, num_extra(len(entries))) for entries in grouped])
        self.buckets = [
            _bucket(number, entries, flat)
            for number, (entries, flat) in enumerate(zip(grouped, flats, strict=True))
        ]
        self._place = {
            id(entry.parameter): (bucket, entry, view)
            for bucket in self.buckets
            for entry, view in zip(bucket.entries, bucket.views, strict=True)
        }
        self._start = start
        self._overlap = overlap
        self._order = list(range(len(self.buckets)))
        self._completed: list[int] = []  # as observed in this step's last chunk
        self._next = 0
        self._last_chunk = False
        self._order_shared = False

    def begin_step(self) -> None:
        """Forget all gradients; nothing is written until one arrives."""
        for bucket in self.buckets:
            bucket.missing, bucket.started = len(bucket.entries), False
            for entry in bucket.entries:
                entry.arrived = entry.counted = False
                entry.parameter.grad = None
        self._completed, self._next, self._last_chunk = [], 0, False

    def begin_last_chunk(self) -> None:
        """From now on a complete bucket may start."""
        self._last_chunk = True

    def room(self, parameter: Tensor) -> Room | None:
        """The parameter's place in its bucket; None if it has none, or the bucket was sent."""
        place = self._place.get(id(parameter))
        if place is None or place[0].started:
            return None
        _, entry, view = place
        return Room(tensor=view, filled=entry.arrived)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Move `parameter.grad` into its bucket, if there is one and it is not there already; in the last
        chunk, nothing more comes after that."""
        bucket, entry, view = self._place[id(parameter)]
        if parameter.grad is not None:
            if bucket.started:
                raise TrainingError(
                    f"The gradient of {entry.name} came a second time after it had been sent (re-entrant checkpointing does this). "
                    "Use overlap=false in the plan."
                )
            _add(parameter.grad, view, to_what_arrived=entry.arrived)
            parameter.grad = None
            entry.arrived = True
        if self._last_chunk and entry.arrived and not entry.counted:
            entry.counted = True
            bucket.missing -= 1
            if not bucket.missing:
                self._completed.append(bucket.number)
                if self._overlap:
                    self._start_complete()

    def start_rest(self) -> None:
        """Start every bucket that has not started, with gradients that nobody called ready; what got none is
        zero."""
        for bucket in self.buckets:
            for entry in bucket.entries:
                self.gradient_ready(entry.parameter) if entry.parameter.grad is not None else None
        while self._next < len(self._order):
            self._start_next()

    def share_order(self, group: Group) -> Steps[None]:
        """Once, after the first step: adopt the order in which rank 0's backward completed the buckets."""
        if self._order_shared:
            return
        self._order_shared = True
        order = [
            *self._completed,
            *(index for index in range(len(self.buckets)) if index not in self._completed),
        ]
        decided = torch.tensor(order, dtype=torch.int64, device=self.buckets[0].flat.device)
        work = group.broadcast(decided, 0)
        yield
        work.wait()
        self._order = decided.tolist()

    def expected_bytes(self) -> ExpectedBytes:
        """Of `share_order`."""
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


def _add(gradient: Tensor, view: Tensor, *, to_what_arrived: bool) -> None:
    # A gradient itself requires none, so nothing here is recorded.
    if gradient is view:
        return  # it was computed there, on top of what had arrived
    if to_what_arrived:
        view.add_(gradient)
    elif gradient.layout == torch.strided:
        view.copy_(gradient)
    else:
        view.zero_().add_(gradient)


def _group(
    named: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int, apart: Collection[str]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters in reverse order, cut into buckets of one dtype and device each."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[list[tuple[str, nn.Parameter]]]] = {}
    filled: dict[tuple[torch.dtype, torch.device, bool], int] = {}
    for name, parameter in reversed(named):
        kind = (parameter.dtype, parameter.device, name in apart)
        groups = kinds.setdefault(kind, [])
        limit = min(bucket_bytes, FIRST_BUCKET_BYTES) if len(groups) == 1 else bucket_bytes
        if not groups or filled[kind] >= limit:
            groups.append([])
            filled[kind] = 0
        groups[-1].append((name, parameter))
        filled[kind] += parameter.numel() * parameter.element_size()
    return [group for groups in kinds.values() for group in groups]


def _extent(named: Sequence[tuple[str, nn.Parameter]], multiple: int, num_extra: int) -> Extent:
    length = num_extra + sum(parameter.numel() for _, parameter in named)
    first = named[0][1]
    return Extent(num_elements=-(-length // multiple) * multiple, dtype=first.dtype, device=first.device)


def _bucket(number: int, named: Sequence[tuple[str, nn.Parameter]], flat: Tensor) -> Bucket:
    entries: list[BucketEntry] = []
    length = 0
    for name, parameter in named:
        entries.append(BucketEntry(name, parameter, length, length + parameter.numel()))
        length += parameter.numel()
    return Bucket(number=number, entries=entries, flat=flat, length=length)
