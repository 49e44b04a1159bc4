"""What gradients travel as: themselves, or a copy in another dtype that comes back as the sum.

    gradients, float32   --cast-->   copy, bfloat16   --reduce-scatter-->   slice, bfloat16   --cast-->   sum, float32

Of gradients of a dtype that is already that one, and in float64, nothing is cast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work

NEVER_CAST = (torch.float64, torch.complex128)


class TravellingSums:
    """Sums of gradients over `group`. dtype: what they travel as; None: their own. never_cast: gradients of these dtypes travel as
    they are. Results are there after `wait`."""

    def __init__(
        self, group: Group, dtype: torch.dtype | None, never_cast: Collection[torch.dtype] = NEVER_CAST
    ) -> None:
        self._group, self._dtype, self._never_cast = group, dtype, never_cast
        if dtype is None:
            self.all_reduce, self.reduce_scatter, self.gather = (
                group.all_reduce,
                group.reduce_scatter,
                group.gather,
            )

    def num_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Of so many elements of gradients of `dtype` on the way."""
        if not self._casts(dtype):
            return num_elements * dtype.itemsize
        assert self._dtype is not None
        return num_elements * (2 if dtype.is_complex else 1) * self._dtype.itemsize

    def all_reduce(self, flat: Tensor, /) -> Work:
        """In place."""
        if not self._casts(flat.dtype):
            return self._group.all_reduce(flat)
        sent = self._cast(flat)
        return _CastBack(self._group.all_reduce(sent), lambda: _real(flat).copy_(sent))

    def reduce_scatter(self, out: Tensor, flat: Tensor, /) -> Work:
        """out: this rank's slice of the sum; it may lie in `flat`."""
        if not self._casts(flat.dtype):
            return self._group.reduce_scatter(out, flat)
        sent = self._cast(flat).view(-1)
        share = sent.numel() // self._group.size
        mine = sent[self._group.rank * share : (self._group.rank + 1) * share]
        received = mine if self._group.is_in_place else torch.empty_like(mine)
        return _CastBack(
            self._group.reduce_scatter(received, sent), lambda: _real(out).view(-1).copy_(received)
        )

    def gather(self, rows: Sequence[Tensor] | None, mine: Tensor, root: int, /) -> Work:
        """rows: on rank `root`, where each rank's gradients arrive."""
        if not self._casts(mine.dtype):
            return self._group.gather(None if rows is None else list(rows), mine, root)
        sent = self._cast(mine)
        received = None if rows is None else [torch.empty_like(sent) for _ in rows]

        def back() -> None:
            for row, came in zip(rows or (), received or (), strict=True):
                _real(row).copy_(came)

        return _CastBack(self._group.gather(received, sent, root), back)

    def _casts(self, dtype: torch.dtype) -> bool:
        return self._dtype is not None and dtype != self._dtype and dtype not in self._never_cast

    def _cast(self, flat: Tensor) -> Tensor:
        return _real(flat).to(self._dtype, copy=True)


class _CastBack(Work):
    """A sum of copies. back: writes it, in the gradients' dtype; called once."""

    def __init__(self, work: Work, back: Callable[[], object]) -> None:
        self._work = work
        self._back: Callable[[], object] | None = back

    def wait(self) -> None:
        self._work.wait()
        if self._back is not None:
            self._back()
            self._back = None

    def is_finished(self) -> bool:
        return self._work.is_finished()


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat
