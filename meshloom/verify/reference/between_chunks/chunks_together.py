"""Chunks whose loss gathers, on one device: each runs by itself, with the other chunks' rows as they are without it.

Of K gathers in a forward, w_k are the rows of all chunks in their order, x_k those of one. All chunks run several times:

    stopping at gather 0, 1, ...       x_k of every chunk, hence w_k
    backward to w_k, k = K-1 ... 0     g_k: the sum over chunks of the gradients of (loss, x_j weighted by g_j for j > k)
    and at last                        each chunk's gradients: of its loss, and of its x_k weighted by g_k

which add up to those of all losses with respect to what all chunks share. What a forward leaves behind is its own alone, as that of
other chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.losses.whole_batch import gathered_by


class RowsMissingError(BaseException):
    """A chunk gathers what the others have not computed. No `Exception`, which the user's code might catch."""


class _Passed(BaseException):
    """A chunk has come as far as it should in this run."""


@dataclass
class _Rows:
    """of_chunks: chunk -> its rows. gradients: likewise, of all chunks' losses, once they are known."""

    of_chunks: dict[int, Tensor]
    has_gradient: bool
    gradients: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class ChunksTogether:
    """The rows that the chunks of a step gather. rows: of every gather in a forward, once they are known."""

    def __init__(self) -> None:
        self.rows: Sequence[_Rows] | None = None
        self._chunk = 0
        self._calls: list[tuple[Tensor, Tensor]] = []  # of the forward under way: its rows, and those of all as a leaf
        # while they are found: those of the gather at which chunks stop, or the gradients of one
        self._finding = False
        self._stopped: dict[int, tuple[Tensor, bool]] = {}
        self._sums: list[Tensor] = []

    @contextmanager
    def forward(self, chunk: int | None) -> Iterator[None]:
        """Around a chunk's forward; None: one that has the whole batch."""
        self._calls = []
        if chunk is None:
            yield
            return
        self._chunk = chunk
        with gathered_by(self._whole):
            yield

    def backward(self, root: Tensor) -> None:
        """Backward of the newest forward's loss; in a run that finds something, as far as that."""
        if not self._finding:
            roots = [(root, None)] + [(x, rows.gradients[self._chunk]) for x, rows in self._used(0)]
            torch.autograd.backward([each for each, _ in roots], [each for _, each in roots])
            return
        if (last := self._last()) is not None:
            leaf = self._calls[last][1]
            later = self._used(last + 1)
            (found,) = torch.autograd.grad(
                [root, *(x for x, _ in later)], leaf, [None, *(rows.gradients[self._chunk] for _, rows in later)], allow_unused=True
            )  # fmt: skip
            self._sums.append(torch.zeros_like(leaf) if found is None else found)
        raise _Passed

    def find(self, run: Callable[[int], None], chunks: Sequence[int]) -> None:
        """Find all rows and their gradients. run: forward and `backward` of a chunk."""
        self.rows, self._finding = [], True
        try:
            while True:
                self._stopped, self._sums = {}, []
                for chunk in chunks:
                    try:
                        run(chunk)
                    except (RowsMissingError, _Passed):
                        pass
                if self._stopped:
                    self._take_rows(chunks)
                elif (last := self._last()) is not None:
                    self._take_gradients(self.rows[last])
                else:
                    return
        finally:
            self._finding = False

    def _whole(self, x: Tensor) -> Tensor:
        number = len(self._calls)
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        if self.rows is None or (self._finding and number == len(self.rows)):
            self._stopped[self._chunk] = x.detach().clone(), has_gradient
            raise RowsMissingError
        if number == len(self.rows):
            raise JobError(
                f"Chunk {self._chunk} makes call {number + 1} of meshloom.gather(), and others do not. Every replica calls it equally often."
            )
        rows = {**self.rows[number].of_chunks, self._chunk: x.detach()}
        whole = torch.cat(list(rows.values())).requires_grad_(has_gradient)
        self._calls.append((x, whole))
        return whole.clone()

    def _used(self, first: int) -> list[tuple[Tensor, _Rows]]:
        """The chunk's own rows of the gathers from `first` on that gradients go through."""
        calls = list(zip(self._calls, self.rows or (), strict=False))[first:]
        return [(x, rows) for (x, _), rows in calls if rows.has_gradient]

    def _last(self) -> int | None:
        """The gather whose gradients are to be found next."""
        open_ = [number for number, each in enumerate(self.rows or ()) if each.has_gradient and not each.gradients]
        return open_[-1] if open_ else None

    def _take_rows(self, chunks: Sequence[int]) -> None:
        assert isinstance(self.rows, list)
        if [*self._stopped] != list(chunks):
            raise JobError(
                f"Of the chunks {', '.join(map(str, chunks))} only {', '.join(map(str, self._stopped))} make call {len(self.rows) + 1} of meshloom.gather(). "
                "Every replica calls it equally often."
            )
        has_gradient = any(each for _, each in self._stopped.values())
        self.rows.append(_Rows({chunk: x for chunk, (x, _) in self._stopped.items()}, has_gradient))

    def _take_gradients(self, rows: _Rows) -> None:
        total = torch.stack([_wide(each) for each in self._sums]).sum(0)
        parts = total.split([len(x) for x in rows.of_chunks.values()])
        for (chunk, x), part in zip(rows.of_chunks.items(), parts, strict=True):
            rows.gradients[chunk] = part.to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
