"""Factors that differ between chunks: how far the centre of a class moves depends on how many samples of it a chunk has.

    centre <- (1 - r n / (1 + n)) centre + ...        n: samples of the class in this chunk

A factor is found with the first chunk that changes an element. Whether others have the same is looked for in the second and
the third one, and ever more rarely, by one run of the chunk on another value; if not, each chunk's own is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from meshloom.core.errors import PeerLostError
from meshloom.replica.buffers.recurrence import Unite, factor_of, finite, first_shift, flat, unflat
from meshloom.replica.buffers.rerun import Rerun
from meshloom.replica.buffers.tracked_buffer import ChunkEnds, TrackedBuffer

_ROUNDING = 1024  # units of the precision, of factors that are equal
_SUSPECTED = 64  # chunks in which factors that differ between elements are looked at


class VaryingFactors:
    """Of the buffers of `model`. every_chunk, unite: of `WriteMaps`."""

    def __init__(self, model: nn.Module, *, every_chunk: bool, unite: Unite) -> None:
        self._model, self._every_chunk, self._unite = model, every_chunk, unite

    def look(self, changed: Sequence[TrackedBuffer], untied: Collection[str], chunk: ChunkEnds) -> None:
        """Give a chunk its own factors, where they differ between chunks. changed: the buffers that it writes. untied: names
        of those that say nothing about others."""
        due: list[TrackedBuffer] = []
        learned: list[TrackedBuffer] = []
        for each in changed:
            if (
                each.name not in untied
                or each.last
                or each.known is None
                or not each.start.is_floating_point()
            ):
                continue
            if isinstance(each.original, nn.Parameter):  # whose factors are found in every step
                continue
            each.chunks += 1
            if each.name in chunk.factors:  # for elements that no chunk has changed before
                learned.append(each)
            elif each.varies or _is_due(each):
                due.append(each)
        for each, moved in zip(learned, self._differ(learned, chunk.factors, chunk), strict=True):
            each.varies = each.varies or moved
        if not due or chunk.rerun is None:
            return
        constant = [each for each in due if not each.varies]
        moved = self._differ(constant, self._factors(constant, changed, chunk), chunk)
        for each in [*(each for each in due if each.varies), *compress(constant, moved)]:
            alone = self._factors([each], changed, chunk)
            if not each.varies and self._differ([each], alone, chunk)[0]:
                each.varies = True
                others = [self._factors([each], changed, chunk, times) for times in (-1.5, 2.625)]
                each.last = self._united([_disagree(each, [alone, *others])], each.start.device)[0]
            chunk.factors |= alone

    def _factors(
        self,
        shifted: Sequence[TrackedBuffer],
        changed: Sequence[TrackedBuffer],
        chunk: ChunkEnds,
        times: float = 1.0,
    ) -> dict[str, Tensor]:
        """Factors [numel] of `shifted`, which get other values together, so far away; none if the chunk cannot be run on
        them."""
        if not shifted or chunk.rerun is None:
            return {}
        points = {each.name: finite(each.start) for each in shifted}
        values = {each.name: each.start for each in changed}
        for each in shifted:
            point = points[each.name]
            values[each.name] = unflat(flat(point) + times * first_shift(point, point), point)
        ends = None if self._every_chunk else {each.name: chunk.ends[each.name] for each in changed}
        try:
            results, _ = Rerun(changed, chunk.rerun, self._model, ends)(values)
        except PeerLostError:
            raise
        except Exception:  # it refuses values that it would never see
            return {}
        found: dict[str, Tensor] = {}
        for each in shifted:
            shift = flat(values[each.name]) - flat(points[each.name])
            moved = flat(results[each.name]) - flat(chunk.ends[each.name])
            found[each.name] = factor_of(moved, shift, each.start.dtype)
        return found

    def _differ(
        self, buffers: Sequence[TrackedBuffer], found: Mapping[str, Tensor], chunk: ChunkEnds
    ) -> list[bool]:
        """Whether factors are not those that are known, on any rank that runs a part of the chunk."""
        if not buffers:
            return []
        mine = [self._differs(each, found.get(each.name), chunk) for each in buffers]
        return self._united(mine, buffers[0].start.device)

    def _united(self, mine: Sequence[bool], device: torch.device) -> list[bool]:
        """Logical or over ranks that run chunks together."""
        flags = torch.tensor(mine, dtype=torch.int64, device=device)
        return [bool(each) for each in self._unite(flags).tolist()]

    def _differs(self, buffer: TrackedBuffer, found: Tensor | None, chunk: ChunkEnds) -> bool:
        if found is None or buffer.factor is None or buffer.known is None:
            return False
        where = buffer.known & torch.isfinite(flat(buffer.start))
        if not self._every_chunk:
            where &= chunk.where[buffer.name]
        known = buffer.factor[where]
        return bool(((found[where] - known).abs() > _limit(buffer) * (1 + known.abs())).any())


def _disagree(buffer: TrackedBuffer, runs: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether what comes out is no multiple of what goes in: a histogram whose range grows is merged otherwise."""
    found = [each[buffer.name] for each in runs if buffer.name in each]
    finite = torch.isfinite(flat(buffer.start))
    limit = _limit(buffer) * (1 + found[0].abs()) if found else 0.0
    return len(found) < 2 or any(bool(((each - found[0]).abs() > limit)[finite].any()) for each in found[1:])


def _is_due(buffer: TrackedBuffer) -> bool:
    count = buffer.chunks
    if count == 3 or (count > 1 and count & (count - 1) == 0):
        return True
    if count > _SUSPECTED or buffer.factor is None:
        return False
    own = buffer.factor[buffer.known]
    own = own[(own != 0) & (own != 1)]
    return bool(own.numel()) and bool(own.max() - own.min() > _limit(buffer) * (1 + own.abs().max()))


def _limit(buffer: TrackedBuffer) -> float:
    """By how much equal factors differ through rounding."""
    return _ROUNDING * torch.finfo(buffer.start.dtype).eps
