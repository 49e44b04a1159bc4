"""Buffers that a training forward changes, over one step's chunks: each reads them as the step found them,
and their writes are merged in order.

    recurrence      b -> a * b + c, found once (`recurrence.py`): a replica's chunks together are one such map, and the replicas' maps are
                    applied in order
    otherwise       the value of the last chunk that changed it, element by element
    tied            buffers that say how others are written (a queue and its pointer): all of them from the last chunk that changed any, whole

So no chunk waits for another, and no schedule and no plan makes a difference
([docs/buffers.md](../../docs/buffers.md)).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.errors import PeerLostError, TrainingError
from meshloom.core.random import preserved_draws
from meshloom.replica.buffers.recurrence import (
    Unite,
    differ,
    factor_of,
    find_recurrences,
    finite,
    first_shift,
    flat,
    same,
    unflat,
)

CHANGED, RESHAPED, LAST, READ, GROUP = range(5)  # facts about a buffer, one number each
# steps between looks at the values of buffers that have never changed; torch counts most writes
LOOK_EVERY = 100


@dataclass
class _Buffer:
    """A buffer. start: its value before the step. last: it is no recurrence. group: the smallest number of
    those that it is tied to."""

    number: int
    name: str
    module: nn.Module
    key: str
    original: Tensor  # the object; a forward may put another in its place
    start: Tensor
    group: int
    version: int = 0  # of `original`, when it had the value `start`
    moved: bool = False  # in some step
    changed: bool = False  # in this one
    reshaped: Tensor | None = None  # what has another shape now
    last: bool = False
    read: bool = False
    factor: Tensor | None = None  # a [numel], where `known`
    known: Tensor | None = None

    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.key)  # pyright: ignore[reportPrivateUsage]

    def put(self, value: Tensor) -> None:
        self.module._buffers[self.key] = value  # pyright: ignore[reportPrivateUsage]

    def put_back(self) -> None:
        """The object and the value that it had before the step."""
        if not same(self.original, self.start):
            with torch.no_grad():
                self.original.copy_(self.start)
        self.put(self.original)
        self.version = self.original._version  # pyright: ignore[reportPrivateUsage]


@dataclass
class _Chunk:
    """What a chunk made of the buffers that it changed, and where it changed them [numel]. again: runs it
    once more."""

    again: Callable[[], Any] | None
    ends: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    where: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class ChunkWrites:
    """The buffers of `model` that are not in `handled` (identities).

    joined: all replicas' chunks with one number are one chunk, so that each replica's value is that of a part
        of it.
    changing: names of the buffers that every chunk changes, if that is known; otherwise it is seen by their
        values. Ranks that run chunks together, each with parts of the buffers, have to know: by its values
        one would run a chunk again and another would not.
    unite: among those ranks (`find_recurrences`).
    """

    def __init__(
        self,
        model: nn.Module,
        handled: set[int],
        *,
        joined: bool,
        changing: Collection[str] | None = None,
        unite: Unite = lambda flags: flags,
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._model = model
        self._joined = joined
        self._changing = changing
        self._unite = unite
        self._steps = 0
        self._begun = False  # a chunk of this step has run
        self._chunks: list[_Chunk] = []
        self._moving: list[_Buffer] = []
        self._told: set[str] = set()
        self._buffers: list[_Buffer] = []
        self._sparse: dict[str, tuple[nn.Module, str]] = {}  # sparse matrices, which have to stay as they are
        for name, buffer in model.named_buffers():
            owner, _, key = name.rpartition(".")
            if buffer.layout != torch.strided:
                self._sparse[name] = modules[owner], key
            elif id(buffer) not in handled and (changing is None or name in changing):
                number = len(self._buffers)
                self._buffers.append(
                    _Buffer(
                        number,
                        name,
                        modules[owner],
                        key,
                        buffer,
                        buffer.detach().clone(),
                        number,
                        version=buffer._version,
                    )  # pyright: ignore[reportPrivateUsage]
                )

    @property
    def length(self) -> int:
        """Elements of what `facts` returns."""
        return (GROUP + 1) * len(self._buffers)

    @contextmanager
    def collecting(self, again: Callable[[], Any] | None) -> Iterator[None]:
        """Around a chunk, which sees the buffers as they were before the step. again: runs its forward anew
        with the same draws and returns its loss."""
        if not self._begun:
            self._begin()
        sparse = self._sparse_writes()
        yield
        for name, writes in self._sparse_writes().items():
            if writes != sparse[name]:
                raise TrainingError(
                    f"Buffer {name} is a sparse matrix that the forward changes, and only dense ones of several chunks can be merged. Make it dense."
                )
        chunk = _Chunk(again)
        for buffer in self._buffers:
            now = buffer.now()
            if now is None or not _fits(now, buffer):
                buffer.reshaped = now
                buffer.put_back()
            elif self._changing is not None or self._may_differ(buffer, now):
                where = differ(now, buffer.start)
                if self._changing is not None or bool(where.any()):
                    chunk.ends[buffer.name], chunk.where[buffer.name] = now.detach().clone(), where
                    buffer.changed = buffer.moved = True
                buffer.put_back()
        self._chunks.append(chunk)
        self._find(chunk)

    def facts(self) -> list[int]:
        """Of every buffer: changed in this step, of another shape now, no recurrence, read by the loss, the
        number of its group."""
        return [
            int(fact)
            for each in self._buffers
            for fact in (
                each.changed,
                each.reshaped is not None,
                each.last,
                each.read and each.changed,
                each.group,
            )
        ]

    def agree(self, facts: Sequence[Sequence[int]]) -> list[str]:
        """Take the union of all replicas' facts; names of the buffers that training reads and changes, each
        once."""
        width = GROUP + 1
        moving: list[_Buffer] = []
        read: list[str] = []
        for at, buffer in enumerate(self._buffers):
            mine = [[rank[width * at + fact] for rank in facts] for fact in range(width)]
            buffer.last = any(mine[LAST])
            for group in mine[GROUP]:
                self._tie(buffer, self._buffers[group])
            if any(mine[CHANGED]) and not any(mine[RESHAPED]):
                moving.append(buffer)
            if any(mine[READ]) and buffer.name not in self._told:
                self._told.add(buffer.name)
                read.append(buffer.name)
        self._moving = moving
        return read

    @property
    def moving_length(self) -> int:
        """Elements of what `take` returns."""
        return 2 * sum(_numel(buffer.start) for buffer in self._moving)

    def take(self) -> Tensor:
        """This replica's maps of the buffers that changed anywhere: a, then c, of each. int64, or the bits of
        float64."""
        parts: list[Tensor] = []
        groups = [buffer.group for buffer in self._buffers]
        for buffer in self._moving:
            tied = (
                [other.name for other in self._buffers if other.group == buffer.group]
                if groups.count(buffer.group) > 1
                else []
            )
            start = flat(buffer.start)
            decay, added = torch.ones_like(start), torch.zeros_like(start)
            for chunk in self._chunks:
                a, c = self._map(buffer, chunk, tied)
                decay, added = a * decay, torch.where(a == 0, c, a * added + c)
            parts += [decay.view(torch.int64), added.view(torch.int64)]
        return torch.cat(parts)

    def apply(self, parts: Tensor) -> list[str]:
        """Apply all replicas' maps [replicas, moving_length] in order, and start the next step; names of
        buffers of which joined chunks have parts."""
        found: list[str] = []
        at = 0
        for buffer in self._moving:
            n = _numel(buffer.start)
            value = flat(buffer.start)
            maps = [
                (row[at : at + n].view(value.dtype), row[at + n : at + 2 * n].view(value.dtype))
                for row in parts
            ]
            if self._joined:
                found += [buffer.name] if not all(same(each, maps[0][1]) for _, each in maps) else []
                maps = maps[-1:]
            for decay, added in maps:
                value = torch.where(
                    decay == 0, added, torch.where((decay == 1) & (added == 0), value, decay * value + added)
                )
            at += 2 * n
            buffer.start = unflat(value, buffer.start)
            with torch.no_grad():
                buffer.original.copy_(buffer.start)
            buffer.version = buffer.original._version  # pyright: ignore[reportPrivateUsage]
        moved = {buffer.number for buffer in self._moving}
        for buffer in self._buffers:
            if buffer.reshaped is not None:
                buffer.put(buffer.reshaped)
            elif buffer.changed and buffer.number not in moved:  # it has another shape elsewhere
                buffer.put(
                    [chunk.ends[buffer.name] for chunk in self._chunks if buffer.name in chunk.ends][-1]
                )
            buffer.changed, buffer.reshaped = False, None
        self._chunks, self._begun = [], False
        self._steps += 1
        return found

    def _sparse_writes(self) -> dict[str, tuple[int, int]]:
        """Which object each sparse buffer is, and torch's count of writes to it."""
        now = {name: module._buffers.get(key) for name, (module, key) in self._sparse.items()}  # pyright: ignore[reportPrivateUsage]
        return {name: (id(each), each._version if each is not None else 0) for name, each in now.items()}  # pyright: ignore[reportPrivateUsage]

    def _begin(self) -> None:
        """Take over what was loaded, or put in place, since the last step."""
        for buffer in self._buffers:
            now = buffer.now()
            if now is None or (now is buffer.original and not self._may_differ(buffer, now)):
                continue
            if not _fits(now, buffer):
                buffer.factor = buffer.known = None
            if not _fits(now, buffer) or not same(now, buffer.start):
                buffer.start = now.detach().clone()
            buffer.original, buffer.version = now, now._version  # pyright: ignore[reportPrivateUsage]
        self._begun = True

    def _may_differ(self, buffer: _Buffer, now: Tensor) -> bool:
        """False: surely nobody has written it. Writes around torch's own count (`.data`) are looked for where
        there have been any writes, and now and then."""
        counted = now is not buffer.original or now._version != buffer.version  # pyright: ignore[reportPrivateUsage]
        return counted or buffer.moved or self._steps % LOOK_EVERY == 0

    def _tie(self, one: _Buffer, other: _Buffer) -> None:
        groups = {one.group, other.group}
        if len(groups) > 1:
            for each in self._buffers:
                each.group = min(groups) if each.group in groups else each.group

    def _find(self, chunk: _Chunk) -> None:
        """Find how the elements that this chunk is the first to change are written."""
        changed = [buffer for buffer in self._buffers if buffer.name in chunk.ends]
        fresh = [
            buffer
            for buffer in changed
            if not buffer.last
            and (buffer.known is None or bool((chunk.where[buffer.name] & ~buffer.known).any()))
        ]
        if self._changing is not None:
            # the same on all ranks
            fresh = [buffer for buffer in changed if buffer.known is None and not buffer.last]
        if not fresh:
            return
        where = chunk.where
        if self._changing is not None:
            where = {name: torch.ones_like(each) for name, each in where.items()}
        try:
            if chunk.again is None:
                raise ValueError("it cannot be run again")
            with _restored(self._model):
                ends = chunk.ends if self._changing is None else None
                run = _Run(changed, chunk.again, self._model, ends)
                found = find_recurrences(
                    {buffer.name: buffer.start for buffer in changed},
                    {buffer.name: buffer.module for buffer in changed},
                    run,
                    self._unite,
                )
        except PeerLostError:
            raise
        except Exception:  # a forward that runs only once
            for buffer in fresh:
                buffer.last = buffer.read = True
            return
        by_name = {buffer.name: buffer for buffer in changed}
        for one, other in found.tied:
            self._tie(by_name[one], by_name[other])
        for buffer in changed:
            buffer.read = buffer.read or buffer.name in found.read
            factor = found.factors.get(buffer.name)
            if factor is None:
                buffer.last, buffer.factor, buffer.known = True, None, None
            elif not buffer.last:
                new = where[buffer.name] if buffer.known is None else where[buffer.name] & ~buffer.known
                buffer.factor = factor if buffer.factor is None else torch.where(new, factor, buffer.factor)
                buffer.known = new if buffer.known is None else buffer.known | new

    def _map(self, buffer: _Buffer, chunk: _Chunk, tied: Sequence[str]) -> tuple[Tensor, Tensor]:
        """a and c [numel] of one chunk."""
        start = flat(buffer.start)
        end = flat(chunk.ends[buffer.name]) if buffer.name in chunk.ends else start
        where = chunk.where.get(buffer.name, torch.zeros_like(start, dtype=torch.bool))
        if tied:
            wrote = any(bool(chunk.where[name].any()) for name in tied if name in chunk.where)
            a = torch.zeros_like(start) if wrote else torch.ones_like(start)
        elif buffer.last:
            a = torch.where(where, 0, torch.ones_like(start))
        else:
            a = torch.where(where, self._factor(buffer, start), self._untouched(buffer, chunk, where, start))
        kept = (a == 1) & ~where
        return a, torch.where(a == 0, end, torch.where(kept, 0, end - a * start))

    def _factor(self, buffer: _Buffer, start: Tensor) -> Tensor:
        """Of elements that a chunk changed. A program that writes other rows in every chunk does to all what
        it did to some."""
        if buffer.factor is None:
            return torch.zeros_like(start)
        if self._changing is not None:
            others = buffer.factor[buffer.factor != 1].unique()
            if len(others) == 1:
                return others.expand_as(start)
        return buffer.factor

    def _untouched(self, buffer: _Buffer, chunk: _Chunk, where: Tensor, start: Tensor) -> Tensor:
        """Factors of elements that a chunk did not change: did it leave them alone, or make of them what they
        were?

        An element that overwrites, or decays towards, the value it has stays the same; only a run on a
        shifted value can tell. A program does the same in every chunk: if all elements have one factor, to
        all of them.
        """
        ones = torch.ones_like(start)
        if self._changing is not None:
            dense = buffer.factor is not None and bool((buffer.factor == buffer.factor[:1]).all())
            return buffer.factor if dense and buffer.factor is not None else ones
        known = (
            buffer.known & (buffer.factor == 1)
            if buffer.known is not None and buffer.factor is not None
            else torch.zeros_like(where)
        )
        unclear = torch.isfinite(start) & ~known & ~where
        if chunk.again is None or not bool(unclear.any()):
            return ones
        point = finite(buffer.start)
        shifted = unflat(flat(point) + first_shift(point, point), point)
        try:
            with _restored(self._model):
                results, _ = _Run([buffer], chunk.again, self._model, None)({buffer.name: shifted})
        except PeerLostError:
            raise
        except Exception:  # it refuses a value that it would never see
            return ones
        factor = factor_of(
            flat(results[buffer.name]) - flat(point), flat(shifted) - flat(point), buffer.start.dtype
        )
        return torch.where(unclear, factor, ones)


class _Run:
    """Runs a chunk again on other values of its buffers. ends: what came of it; where its forward alone gives
    something else, its backward runs too."""

    def __init__(
        self,
        buffers: Iterable[_Buffer],
        again: Callable[[], Any],
        model: nn.Module,
        ends: Mapping[str, Tensor] | None,
    ) -> None:
        self._buffers = list(buffers)
        self._again = again
        self._model = model
        self._backward = False
        if ends is not None:
            results, _ = self({buffer.name: buffer.start for buffer in self._buffers})
            self._backward = any(not same(results[name], end) for name, end in ends.items())

    def __call__(self, values: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        for buffer in self._buffers:
            buffer.put(values[buffer.name].clone())
        with torch.set_grad_enabled(self._backward), preserved_draws():
            loss = self._again()
            # checkpointed parts write once more
            if self._backward and isinstance(loss, Tensor) and loss.requires_grad:
                loss_of = [each for each in self._model.parameters() if each.requires_grad]
                torch.autograd.grad(loss, loss_of, allow_unused=True)
        results = {buffer.name: buffer.now() for buffer in self._buffers}
        if any(
            result is None or not _fits(result, buffer)
            for result, buffer in zip(results.values(), self._buffers, strict=True)
        ):
            raise ValueError("a buffer took another shape")
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        return {name: result.detach().clone() for name, result in results.items() if result is not None}, loss


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, the object and its values."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                if (
                    not buffer.is_meta and buffer.layout == torch.strided and not same(buffer, value)
                ):  # a backward to come may want what did not change
                    buffer.copy_(value)
                module._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]


def _fits(now: Tensor, buffer: _Buffer) -> bool:
    return now.shape == buffer.start.shape and now.dtype == buffer.start.dtype


def _numel(value: Tensor) -> int:
    return value.numel() * (2 if value.is_complex() else 1)
