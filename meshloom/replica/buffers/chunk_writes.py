"""Buffers that a training forward changes, over one step's chunks, whose writes are merged in order.

    recurrence      b -> a * b + c, found once (`recurrence.py`); the replicas' maps are applied in order
    otherwise       the value of the last chunk that changed it, element by element
    tied            buffers that say how others are written (a queue and its pointer): all of them from the
                    last chunk that changed any, whole
    other shapes    what the last chunk that changed it made of it, whole

So no chunk waits for another, and no schedule and no plan makes a difference (docs/buffers.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.program.ir.written_parameters import named_buffers
from meshloom.replica.buffers.recurrence import Unite, differ, flat, same, unflat
from meshloom.replica.buffers.reshaped_buffers import ReshapedBuffers
from meshloom.replica.buffers.tracked_buffer import ChunkEnds, TrackedBuffer, fits, num_reals
from meshloom.replica.buffers.varying_factors import VaryingFactors
from meshloom.replica.buffers.write_maps import WriteMaps

CHANGED, RESHAPED, LAST, READ, GROUP = range(5)  # facts about a buffer, one number each
# steps between looks at the values of buffers that have never changed; torch counts most writes
LOOK_EVERY = 100


class ChunkWrites:
    """The buffers of `model` that are not in `handled` (identities), and parameters that count as buffers.

    joined: all replicas' chunks with one number are one chunk: each replica's value is that of a part of it.
    changing: names of the buffers that every chunk changes, if that is known; otherwise it is seen by their
        values. Ranks that run chunks together, each with parts of the buffers, have to know: by its values
        one would run a chunk again and another would not.
    perhaps: names of further ones, of modules that run as written, equally on those ranks: seen by their values.
    unite: among those ranks (`find_recurrences`).
    """

    def __init__(
        self,
        model: nn.Module,
        handled: set[int],
        *,
        joined: bool,
        changing: Collection[str] | None,
        perhaps: Collection[str] = (),
        unite: Unite,
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._joined = joined
        self._changing = changing
        self._maps = WriteMaps(model, every_chunk=changing is not None, unite=unite)
        self._varying = VaryingFactors(model, every_chunk=changing is not None, unite=unite)
        self._steps = 0
        self._begun = False  # a chunk of this step has run
        self._chunks: list[ChunkEnds] = []
        self._moving: list[TrackedBuffer] = []
        self.reshaped = ReshapedBuffers([])  # of this step, once replicas agree
        self._told: set[str] = set()
        self._buffers: list[TrackedBuffer] = []
        for name, buffer in named_buffers(model):
            owner, _, key = name.rpartition(".")
            if id(buffer) in handled:
                continue
            if changing is None or name in changing or name in perhaps:
                number, start = len(self._buffers), buffer.detach().clone()
                version = buffer._version  # pyright: ignore[reportPrivateUsage]
                tracked = TrackedBuffer(
                    number, name, modules[owner], key, buffer, start, number, version=version
                )
                # a teacher is written through `.data`, which torch does not count
                tracked.moved = isinstance(buffer, nn.Parameter)
                tracked.is_sure = changing is not None and name in changing
                self._buffers.append(tracked)

    @property
    def length(self) -> int:
        """Elements of what `facts` returns."""
        return (GROUP + 1) * len(self._buffers)

    @contextmanager
    def collecting(self, rerun: Callable[[], Any] | None) -> Iterator[None]:
        """Around a chunk, which sees the buffers as before the step. rerun: of `RunningStatistics.chunk`."""
        if not self._begun:
            self._begin()
        yield
        chunk = ChunkEnds(rerun)
        for buffer in self._buffers:
            now = buffer.now()
            if now is None or not fits(now, buffer):
                buffer.latest, buffer.reshaped = None if now is None else now.detach().clone(), True
                buffer.moved = True
                buffer.put_back()
            elif buffer.is_sure or self._may_differ(buffer, now):
                where = differ(now, buffer.start)
                if buffer.is_sure or bool(where.any()):
                    chunk.ends[buffer.name], chunk.where[buffer.name] = now.detach().clone(), where
                    buffer.changed = buffer.moved = True
                    buffer.latest = chunk.ends[buffer.name]
                buffer.put_back()
        self._chunks.append(chunk)
        changed = {each.name: each for each in self._buffers if each.name in chunk.ends}
        for one, other in self._maps.learn(list(changed.values()), chunk):
            self._tie(changed[one], changed[other])
        sizes = Counter(buffer.group for buffer in self._buffers)
        untied = {each.name for each in changed.values() if sizes[each.group] == 1}
        self._varying.look(list(changed.values()), untied, chunk)
        if len(self._chunks) == 1:  # the first one of the step
            written = [each for each in self._buffers if isinstance(each.original, nn.Parameter)]
            self._maps.learn_again([each for each in written if each.group == each.number], chunk)
        for each in self._buffers:
            if each.moved:  # at the end of the step its parameters may be gone (zero=3)
                self._maps.look_at_untouched(each, chunk)

    def facts(self) -> list[int]:
        """Of every buffer: `CHANGED` and `RESHAPED` in this step, `LAST` (no recurrence), `READ`, `GROUP`."""
        facts: list[int] = []
        for each in self._buffers:
            read = each.read and each.changed
            facts += map(int, (each.changed, each.reshaped, each.last, read, each.group))
        return facts

    def agree(self, facts: Sequence[Sequence[int]]) -> list[str]:
        """Take the union of all replicas' facts; new names of buffers that training reads and changes."""
        width = GROUP + 1
        moving: list[TrackedBuffer] = []
        reshaped: list[TrackedBuffer] = []
        read: list[str] = []
        for at, buffer in enumerate(self._buffers):
            mine = [[rank[width * at + fact] for rank in facts] for fact in range(width)]
            buffer.last = any(mine[LAST])
            for group in mine[GROUP]:
                self._tie(buffer, self._buffers[group])
            if any(mine[RESHAPED]):
                reshaped.append(buffer)
            elif any(mine[CHANGED]):
                moving.append(buffer)
            if any(mine[READ]) and buffer.name not in self._told:
                self._told.add(buffer.name)
                read.append(buffer.name)
        self._moving, self.reshaped = moving, ReshapedBuffers(reshaped)
        return read

    @property
    def runs_again(self) -> bool:
        """Whether `take` may run chunks again, on some replica."""
        sizes = Counter(buffer.group for buffer in self._buffers)
        return self._changing is None and any(
            not each.last and sizes[each.group] == 1 for each in self._moving
        )

    @property
    def moving_length(self) -> int:
        """Elements of what `take` returns."""
        return 2 * sum(num_reals(buffer.start) for buffer in self._moving)

    def take(self) -> Tensor:
        """This replica's maps of the changed buffers: a, then c, of each, int64 or the bits of float64."""
        parts: list[Tensor] = []
        for buffer in self._moving:
            group = [other.name for other in self._buffers if other.group == buffer.group]
            tied = group if len(group) > 1 else []
            start = flat(buffer.start)
            decay, added = torch.ones_like(start), torch.zeros_like(start)
            for chunk in self._chunks:
                a, c = self._maps.of_chunk(buffer, chunk, tied)
                decay, added = a * decay, torch.where(a == 0, c, a * added + c)
            parts += [decay.view(torch.int64), added.view(torch.int64)]
        return torch.cat(parts)

    def apply(self, parts: Tensor) -> list[str]:
        """Apply all replicas' maps [replicas, moving_length] in order, and start the next step.

        Returns the names of buffers of which joined chunks have parts.
        """
        in_parts: list[str] = []
        at = 0
        for buffer in self._moving:
            n = num_reals(buffer.start)
            value = flat(buffer.start)
            maps = [
                (row[at : at + n].view(value.dtype), row[at + n : at + 2 * n].view(value.dtype))
                for row in parts
            ]
            if self._joined:
                if not all(same(each, maps[0][1]) for _, each in maps):
                    in_parts.append(buffer.name)
                maps = maps[-1:]
            for decay, added in maps:
                untouched = (decay == 1) & (added == 0)
                value = torch.where(decay == 0, added, torch.where(untouched, value, decay * value + added))
            at += 2 * n
            buffer.start = unflat(value, buffer.start)
            with torch.no_grad():
                buffer.original.copy_(buffer.start)
            buffer.version = buffer.original._version  # pyright: ignore[reportPrivateUsage]
        for buffer in self._buffers:
            buffer.changed, buffer.reshaped, buffer.latest = False, False, None
        self._chunks, self._begun = [], False
        self._steps += 1
        return in_parts

    def _begin(self) -> None:
        """Take over what was loaded, or put in place, since the last step."""
        for buffer in self._buffers:
            now = buffer.now()
            if now is None or (now is buffer.original and not self._may_differ(buffer, now)):
                continue
            if not fits(now, buffer):
                buffer.factor = buffer.known = None
            if not fits(now, buffer) or not same(now, buffer.start):
                buffer.start = now.detach().clone()
            buffer.original, buffer.version = now, now._version  # pyright: ignore[reportPrivateUsage]
        self._begun = True

    def _may_differ(self, buffer: TrackedBuffer, now: Tensor) -> bool:
        """False: surely nobody has written it. Writes around torch's own count (`.data`) are looked for where
        there have been any writes, and now and then."""
        counted = now is not buffer.original or now._version != buffer.version  # pyright: ignore[reportPrivateUsage]
        return counted or buffer.moved or self._steps % LOOK_EVERY == 0

    def _tie(self, one: TrackedBuffer, other: TrackedBuffer) -> None:
        groups = {one.group, other.group}
        if len(groups) > 1:
            for each in self._buffers:
                each.group = min(groups) if each.group in groups else each.group
