"""How chunks write buffers: maps b -> a * b + c, elementwise, found by running a chunk on other values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

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
from meshloom.replica.buffers.rerun import Rerun
from meshloom.replica.buffers.tracked_buffer import ChunkEnds, TrackedBuffer


class WriteMaps:
    """Of the buffers of `model`. every_chunk: every chunk changes all, as a program says; else it is seen.

    unite: among ranks that run chunks together (`find_recurrences`).
    """

    def __init__(self, model: nn.Module, *, every_chunk: bool, unite: Unite) -> None:
        self._model, self._every_chunk, self._unite = model, every_chunk, unite

    def learn(self, changed: Sequence[TrackedBuffer], chunk: ChunkEnds) -> list[tuple[str, str]]:
        """Find how the elements are written that this chunk is the first to change. changed: its buffers.

        Returns pairs of buffers of which one says how the other is written.
        """
        where, ends = chunk.where, chunk.ends
        if self._every_chunk:  # all elements count, so that all ranks do the same
            where, ends = {name: torch.ones_like(each) for name, each in where.items()}, None
        fresh = self._fresh(changed, chunk)
        if (
            fresh and self._every_chunk
        ):  # what still has the value that it is given (a teacher's, at first) tells nothing
            changed = self._moved(changed, chunk)
            fresh = self._fresh(changed, chunk)
        if not fresh:
            return []
        try:
            if chunk.rerun is None:
                raise ValueError("it cannot be run again")
            run = Rerun(changed, chunk.rerun, self._model, ends)
            starts = {buffer.name: buffer.start for buffer in changed}
            modules = {buffer.name: buffer.module for buffer in changed}
            parameters = [each.name for each in changed if isinstance(each.original, nn.Parameter)]
            written = find_recurrences(starts, modules, run, self._unite, known_read=parameters)
        except PeerLostError:
            raise
        except Exception:  # a forward that runs only once
            for buffer in fresh:
                buffer.last = buffer.read = True
            return []
        for buffer in changed:
            buffer.read = buffer.read or buffer.name in written.read
            factor, new = written.factors.get(buffer.name), where[buffer.name] & _finite(buffer)
            if not bool(new.any()):  # it may be written otherwise once it is finite
                continue
            if factor is None:
                buffer.last, buffer.factor, buffer.known = True, None, None
            elif not buffer.last:
                chunk.factors[buffer.name] = factor
                new = new if buffer.known is None else new & ~buffer.known
                buffer.factor = factor if buffer.factor is None else torch.where(new, factor, buffer.factor)
                buffer.known = new if buffer.known is None else buffer.known | new
        # those are tried on zeros: a minimum of 0 may not be shifted, and seems to say how others are written
        undefined = {each.name for each in changed if not bool(_finite(each).all())}
        return [pair for pair in written.tied if undefined.isdisjoint(pair)]

    def learn_again(self, buffers: Sequence[TrackedBuffer], chunk: ChunkEnds) -> None:
        """The factors of this step, by one more run: how fast a teacher follows often changes with the step."""
        found = [each for each in buffers if not each.last and each.known is not None]
        if not found or chunk.rerun is None:
            return
        points = {each.name: finite(each.start) for each in found}
        shifted = {
            name: unflat(flat(point) + first_shift(point, point), point) for name, point in points.items()
        }
        results, _ = Rerun(found, chunk.rerun, self._model, None)(shifted)
        for each in found:
            end = chunk.ends.get(each.name, each.start)
            shift = flat(shifted[each.name]) - flat(points[each.name])
            each.factor = factor_of(flat(results[each.name]) - flat(end), shift, each.start.dtype)
            each.known = _finite(each)

    def _fresh(self, changed: Sequence[TrackedBuffer], chunk: ChunkEnds) -> list[TrackedBuffer]:
        return [each for each in changed if not (each.last or each.varies) and self._has_new(each, chunk)]

    def _moved(self, buffers: Sequence[TrackedBuffer], chunk: ChunkEnds) -> list[TrackedBuffer]:
        """Those whose values the chunk has changed, on any rank that runs a part of it."""
        mine = [bool(chunk.where[each.name].any()) for each in buffers]
        flags = self._unite(torch.tensor(mine, dtype=torch.int64, device=buffers[0].start.device))
        return list(compress(buffers, flags.tolist()))

    def _has_new(self, buffer: TrackedBuffer, chunk: ChunkEnds) -> bool:
        """Whether the chunk has changed elements whose factor is not known; on all ranks or on none."""
        if self._every_chunk:
            return buffer.known is None and bool(_finite(buffer).any())
        new = chunk.where[buffer.name] & _finite(buffer)
        return bool((new if buffer.known is None else new & ~buffer.known).any())

    def of_chunk(self, buffer: TrackedBuffer, chunk: ChunkEnds, tied: Sequence[str]) -> tuple[Tensor, Tensor]:
        """a and c [numel] of one chunk."""
        start = flat(buffer.start)
        end = flat(chunk.ends[buffer.name]) if buffer.name in chunk.ends else start
        where = chunk.where.get(buffer.name, torch.zeros_like(start, dtype=torch.bool))
        if tied:
            wrote = any(bool(chunk.where[name].any()) for name in tied if name in chunk.where)
            a = torch.zeros_like(start) if wrote else torch.ones_like(start)
        elif buffer.last or (self._every_chunk and buffer.name not in chunk.ends):
            a = torch.where(where, 0, torch.ones_like(start))
        elif buffer.varies and buffer.name in chunk.factors:
            a = torch.where(where | torch.isfinite(start), chunk.factors[buffer.name], 1.0)
        else:
            a = torch.where(where, self._factor(buffer, start), self._untouched(buffer, chunk, where, start))
        # a start like an observer's: the last write counts
        a = torch.where(where & ~torch.isfinite(start), 0, a)
        kept = (a == 1) & ~where
        return a, torch.where(a == 0, end, torch.where(kept, 0, end - a * start))

    def _factor(self, buffer: TrackedBuffer, start: Tensor) -> Tensor:
        """Of elements that a chunk changed. A program that writes other rows each time treats all alike."""
        if buffer.factor is None:
            return torch.zeros_like(start)
        if self._every_chunk:
            others = buffer.factor[buffer.factor != 1]
            if len(others) and _are_equal(others, buffer):
                return torch.where(buffer.factor == 1, others[0], buffer.factor)
        return buffer.factor

    def look_at_untouched(self, buffer: TrackedBuffer, chunk: ChunkEnds) -> None:
        """Find the factors of elements that a chunk did not change, now that it can be run again."""
        if not buffer.last and not self._every_chunk:
            start = flat(buffer.start)
            where = chunk.where.get(buffer.name, torch.zeros_like(start, dtype=torch.bool))
            if isinstance(buffer.original, nn.Parameter) and buffer.factor is not None:
                chunk.untouched[buffer.name] = buffer.factor  # of all elements, in every step
                return
            chunk.untouched[buffer.name] = self._untouched(buffer, chunk, where, start)

    def _untouched(self, buffer: TrackedBuffer, chunk: ChunkEnds, where: Tensor, start: Tensor) -> Tensor:
        """Factors of elements that a chunk did not change: did it leave them alone, or write what they were?

        An element that overwrites, or decays towards, the value it has stays the same; only a run on a
        shifted value can tell. A program does the same in every chunk: one factor of all elements stays.
        """
        ones = torch.ones_like(start)
        if buffer.name in chunk.untouched:
            return chunk.untouched[buffer.name]
        if self._every_chunk:
            dense = buffer.factor is not None and _are_equal(buffer.factor, buffer)
            return buffer.factor if dense and buffer.factor is not None else ones
        unclear = torch.isfinite(start) & ~where
        if buffer.known is not None and buffer.factor is not None:
            unclear &= ~(buffer.known & (buffer.factor == 1))
        if chunk.rerun is None or not bool(unclear.any()):
            return ones
        point = finite(buffer.start)
        shifted = unflat(flat(point) + first_shift(point, point), point)
        try:
            results, _ = Rerun([buffer], chunk.rerun, self._model, None)({buffer.name: shifted})
        except PeerLostError:
            raise
        except Exception:  # it refuses a value that it would never see
            return ones
        out, shift = flat(results[buffer.name]) - flat(point), flat(shifted) - flat(point)
        return torch.where(unclear, factor_of(out, shift, buffer.start.dtype), ones)


def _are_equal(factors: Tensor, buffer: TrackedBuffer) -> bool:
    """Whether factors are one number, but for the rounding of the runs that they were found by."""
    if not factors.is_floating_point():
        return bool((factors == factors[:1]).all())
    limit = 64 * torch.finfo(buffer.start.dtype).eps
    return bool(((factors - factors[:1]).abs() <= limit * (1 + factors[:1].abs())).all())


def _finite(buffer: TrackedBuffer) -> Tensor:
    """Whether each element [numel] was finite before the step."""
    return torch.isfinite(flat(buffer.start))
