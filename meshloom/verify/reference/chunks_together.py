"""Chunks whose loss gathers, on one device: each runs by itself, with the other chunks' rows as they are without it.

Of K gathers in a forward, w_k are the rows of all chunks in their order, x_k those of one. All chunks run several times:

    stopping at gather 0, 1, ...       x_k of every chunk, hence w_k
    backward to w_k, k = K-1 ... 0     g_k: the sum over chunks of their losses' gradients; x_j for j > k pass on their part of g_j
    and at last                        each chunk's gradients, in which x_k pass on their part of g_k

which add up to those of the sum of all losses. What a forward leaves behind is its own alone, as that of other chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.moments.current_step import answered_by
from meshloom.verify.reference.chunks_of_plan import ReferenceForward
from meshloom.verify.reference.state_before import StateBefore

R = TypeVar("R")


class RowsMissingError(BaseException):
    """A chunk gathers what the others have not computed. No `Exception`, which the user's code might catch."""


class _PassedError(BaseException):
    """A chunk has come as far as it should in this run."""


@dataclass
class _Rows:
    """of_chunks: chunk -> its rows. gradients: likewise, of all chunks' losses, once they are known."""

    of_chunks: dict[int, Tensor]
    has_gradient: bool
    gradients: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class ChunksTogether:
    """The rows that the chunks of a step gather on `model`. rows: of every gather in a forward; None: they are not known."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gathers = True  # whether the loss does; until it has been computed it may
        self.rows: list[_Rows] | None = None
        self._chunk = 0
        # of the forward under way: all rows, and an anchor if they have a gradient
        self._calls: list[Sequence[Tensor]] = []
        # while they are found: of chunks that stop at a gather, its rows; of others the gradients of one
        self._finding = False
        self._stopped: dict[int, tuple[Tensor, bool]] = {}
        self._gradients: list[Tensor] = []

    def run(
        self, run: Callable[[ReferenceForward, bool], R], forward: ReferenceForward, watched: bool, forwards: Callable[[], Iterable[ReferenceForward]]
    ) -> R:  # fmt: skip
        """`run(forward, watched)`, after all that its chunk gathers has been found. run: with what another run leaves undone is done
        again, apart from buffers. forwards: all of the step."""
        if self.rows is not None or not self._gathers:
            return run(forward, watched)
        before = StateBefore(self._model)

        def run_again(each: ReferenceForward) -> None:
            before.put_back()
            run(each, False)

        try:
            result = run(forward, watched)
        except RowsMissingError:
            self._find(run_again, list(forwards()))
            before.put_back()
            result = run(forward, watched)
        self._gathers = bool(self.rows)
        return result

    @contextmanager
    def forward(self, chunk: int | None) -> Iterator[None]:
        """Around a chunk's forward; None: one that has the whole batch."""
        self._calls = []
        if chunk is None:
            yield
            return
        self._chunk = chunk
        with answered_by(gather=self._whole):
            yield

    def backward(self, root: Tensor) -> None:
        """Backward of the newest forward's loss; in a run that finds something, as far as that."""
        # gradients of rows arrive also where this chunk makes no use of them
        for _, *anchor in self._calls:
            root = root + anchor[0].to(root.dtype) if anchor else root
        if not self._finding:
            root.backward()
            return
        if (last := self._last()) is not None:
            whole = self._calls[last][0]
            (found,) = torch.autograd.grad(root, whole, allow_unused=True)
            self._gradients.append(torch.zeros_like(whole) if found is None else found)
        raise _PassedError

    def _find(self, run: Callable[[ReferenceForward], None], forwards: Sequence[ReferenceForward]) -> None:
        """Find all rows and their gradients. run: forward and `backward` of a chunk."""
        self.rows, self._finding = [], True
        try:
            while True:
                self._stopped, self._gradients = {}, []
                for forward in forwards:
                    with suppress(RowsMissingError, _PassedError):
                        run(forward)
                if self._stopped:
                    self.rows.append(self._rows_of([each.members[0][0] for each in forwards]))
                elif (last := self._last()) is not None:
                    self._take_gradients(self.rows[last])
                else:
                    return
        finally:
            self._finding = False

    def _whole(self, x: Tensor) -> Tensor:
        number, rows = len(self._calls), self.rows or []
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        if self.rows is None or (self._finding and number == len(rows)):
            self._stopped[self._chunk] = x.detach().clone(), has_gradient
            raise RowsMissingError
        if number == len(rows):
            raise JobError(
                f"Chunk {self._chunk} makes call {number + 1} of meshloom.gather(), and others do not. Every replica calls it equally often."
            )
        here = rows[number]
        whole = torch.cat([x.detach() if chunk == self._chunk else each for chunk, each in here.of_chunks.items()])  # fmt: skip
        call = _Joined.apply(x, whole, here.gradients.get(self._chunk)) if has_gradient else (whole,)
        self._calls.append(call)
        return call[0]

    def _last(self) -> int | None:
        """The gather whose gradients are to be found next."""
        rows = enumerate(self.rows or ())
        missing = [number for number, each in rows if each.has_gradient and not each.gradients]
        return missing[-1] if missing else None

    def _rows_of(self, chunks: Sequence[int]) -> _Rows:
        if [*self._stopped] != [*chunks]:
            raise JobError(
                f"Of the chunks {', '.join(map(str, chunks))} only {', '.join(map(str, self._stopped))} make call {len(self.rows or ()) + 1} of meshloom.gather(). "
                "Every replica calls it equally often."
            )
        has_gradient = any(each for _, each in self._stopped.values())
        return _Rows({chunk: x for chunk, (x, _) in self._stopped.items()}, has_gradient)

    def _take_gradients(self, rows: _Rows) -> None:
        first = self._gradients[0]
        half = first.dtype in (torch.float16, torch.bfloat16)
        total = sum(self._gradients[1:], first.float() if half else first)
        parts = total.to(first.dtype).split([len(x) for x in rows.of_chunks.values()])
        rows.gradients = dict(zip(rows.of_chunks, parts, strict=True))


class _Joined(torch.autograd.Function):
    """`whole`, of which `x` are a chunk's rows, and an anchor. gradient: that x gets, whatever the chunk makes of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.gradient = gradient
        return whole.clone(), torch.zeros((), dtype=torch.float64, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.gradient, None, None
