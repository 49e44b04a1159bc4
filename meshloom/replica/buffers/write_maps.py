"""How chunks write buffers: each write as a map b -> a * b + c, element by element, found by running a chunk
again on other values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshloom.core.errors import PeerLostError
from meshloom.replica.buffers.recurrence import (
    Unite,
    factor_of,
    find_recurrences,
    finite,
    first_shift,
    flat,
    unflat,
)
from meshloom.replica.buffers.rerun import Rerun, restored
from meshloom.replica.buffers.tracked_buffer import ChunkEnds, TrackedBuffer


class WriteMaps:
    """Of the buffers of `model`. every_chunk: every chunk changes all of them, which a program says;
    otherwise it is seen by their values. unite: among ranks that run chunks together (`find_recurrences`)."""

    def __init__(self, model: nn.Module, *, every_chunk: bool, unite: Unite) -> None:
        self._model, self._every_chunk, self._unite = model, every_chunk, unite

    def learn(self, changed: Sequence[TrackedBuffer], chunk: ChunkEnds) -> list[tuple[str, str]]:
        """Find how the elements are written that this chunk is the first to change. changed: the buffers that
        it changed.

        Returns pairs of buffers of which one says how the other is written.
        """
        fresh = [
            buffer
            for buffer in changed
            if not buffer.last
            and (buffer.known is None or bool((chunk.where[buffer.name] & ~buffer.known).any()))
        ]
        if self._every_chunk:
            # the same on all ranks
            fresh = [buffer for buffer in changed if buffer.known is None and not buffer.last]
        if not fresh:
            return []
        where = chunk.where
        if self._every_chunk:
            where = {name: torch.ones_like(each) for name, each in where.items()}
        try:
            if chunk.rerun is None:
                raise ValueError("it cannot be run again")
            with restored(self._model):
                ends = chunk.ends if not self._every_chunk else None
                run = Rerun(changed, chunk.rerun, self._model, ends)
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
            return []
        for buffer in changed:
            buffer.read = buffer.read or buffer.name in found.read
            factor = found.factors.get(buffer.name)
            if factor is None:
                buffer.last, buffer.factor, buffer.known = True, None, None
            elif not buffer.last:
                new = where[buffer.name] if buffer.known is None else where[buffer.name] & ~buffer.known
                buffer.factor = factor if buffer.factor is None else torch.where(new, factor, buffer.factor)
                buffer.known = new if buffer.known is None else buffer.known | new
        return list(found.tied)

    def of_chunk(self, buffer: TrackedBuffer, chunk: ChunkEnds, tied: Sequence[str]) -> tuple[Tensor, Tensor]:
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

    def _factor(self, buffer: TrackedBuffer, start: Tensor) -> Tensor:
        """Of elements that a chunk changed. A program that writes other rows in every chunk does to all what
        it did to some."""
        if buffer.factor is None:
            return torch.zeros_like(start)
        if self._every_chunk:
            others = buffer.factor[buffer.factor != 1].unique()
            if len(others) == 1:
                return others.expand_as(start)
        return buffer.factor

    def _untouched(self, buffer: TrackedBuffer, chunk: ChunkEnds, where: Tensor, start: Tensor) -> Tensor:
        """Factors of elements that a chunk did not change: did it leave them alone, or make of them what they
        were?

        An element that overwrites, or decays towards, the value it has stays the same; only a run on a
        shifted value can tell. A program does the same in every chunk: if all elements have one factor, to
        all of them.
        """
        ones = torch.ones_like(start)
        if self._every_chunk:
            dense = buffer.factor is not None and bool((buffer.factor == buffer.factor[:1]).all())
            return buffer.factor if dense and buffer.factor is not None else ones
        known = (
            buffer.known & (buffer.factor == 1)
            if buffer.known is not None and buffer.factor is not None
            else torch.zeros_like(where)
        )
        unclear = torch.isfinite(start) & ~known & ~where
        if chunk.rerun is None or not bool(unclear.any()):
            return ones
        point = finite(buffer.start)
        shifted = unflat(flat(point) + first_shift(point, point), point)
        try:
            with restored(self._model):
                results, _ = Rerun([buffer], chunk.rerun, self._model, None)({buffer.name: shifted})
        except PeerLostError:
            raise
        except Exception:  # it refuses a value that it would never see
            return ones
        factor = factor_of(
            flat(results[buffer.name]) - flat(point), flat(shifted) - flat(point), buffer.start.dtype
        )
        return torch.where(unclear, factor, ones)
