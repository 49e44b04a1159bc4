"""One rank's calls of `meshloom.gather`: replicas exchange rows within forward, and their gradients within backward.

    forward    what is called, its shape -> all-gather (control)       rows, padded to the most of a replica -> all-gather
    the end    "over" -> all-gather (control)                          so that a replica that does not call is named
    backward                                                           gradients of all rows, padded -> reduce-scatter

The end is exchanged with the first chunk, and from then on if the loss gathers: others pass none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshloom.comm.group import Group
from meshloom.comm.rank_context import RankContext
from meshloom.core.errors import JobError, PlanError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.moments.current_step import answered_by, step
from meshloom.core.plan import Plan
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class GatheredRows:
    """The calls of one rank, which computes one chunk a step.

    updates: whether the rank updates parameters, as workers of an asynchronous run do not.
    meet: is called before replicas exchange something.
    answer: of `gather` in the loss; None: this rank has the whole batch. may_wait: whether a forward may wait for other replicas: the loss calls it, or has
    not been computed yet.
    """

    def __init__(self, plan: Plan, context: RankContext, *, updates: bool, meet: Callable[[], None]) -> None:
        self._group, self._control = context.statistics, context.readers
        self._meet = meet
        self._refusal = _refusal(plan, updates=updates)
        self._is_whole = plan.num_chunks == 1 and updates  # whoever has the whole batch
        self.may_wait = not (self._is_whole or self._refusal)
        self._step = self._batch = 0
        self._found: list[_Found] = []  # of the newest forward
        self._anchors: list[Tensor] = []
        self._expected = Traffic()
        # left out of compiled code
        outside: Any = torch.compiler.disable if plan.compiles else lambda answer: answer
        self.answer: Callable[[Tensor], Tensor] | None = (
            None if self._is_whole else outside(self._answered_now)
        )
        self._answer = self._gathered

    def begin(self, step: int, batch: int) -> None:
        """Before a forward that may wait. batch: samples of all replicas."""
        self._found, self._anchors = [], []
        self._step, self._batch = step, batch
        self._answer = self._gathered

    def end_forward(self, root: Tensor) -> Tensor:
        """The root of backward of such a forward, once the loss is known. Raises `JobError` where another replica calls once more."""
        self._answer = _in_backward
        self._agree(_Call(kind=_END, step=self._step, batch=self._batch))
        self.may_wait = bool(self._found)
        # every replica sends gradients of every call, whatever its own loss has used
        return _Anchored.apply(root, *self._anchors) if self._anchors else root

    def idle(self) -> None:
        """In a step in which this replica has no samples."""
        if self.may_wait:
            self._agree(_Call(kind=_EMPTY))
            self.may_wait = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the newest forward when it runs once more, on this rank alone: other replicas' rows are those that they had."""
        found = iter(self._found)

        def known(x: Tensor) -> Tensor:
            if self._refusal:
                raise PlanError(self._refusal)
            if (each := next(found, None)) is None:
                raise JobError(
                    f"The loss of step {self._step} calls meshloom.gather() more often when its chunk runs again. Call it equally often each time."
                )
            return torch.cat([each.whole[: each.start], x, each.whole[each.stop :]])

        with self._answered(known):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a metric."""
        with self._answered(_in_metric):
            yield

    def expected_bytes(self) -> ExpectedBytes:
        """Of the calls so far, by the shapes that they were given."""
        return ExpectedBytes(so_far=self._expected)

    @contextmanager
    def _answered(self, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
        if self._is_whole:
            yield
            return
        with answered_by(gather=answer):
            yield

    def _answered_now(self, x: Tensor) -> Tensor:
        return self._answer(x)

    def _gathered(self, x: Tensor) -> Tensor:
        if self._refusal:
            raise PlanError(self._refusal)
        if not self.may_wait:
            raise JobError(
                f"meshloom.gather() is called in step {step()}, and was not when this loss was first computed, so other replicas do not wait for it. "
                "Call it in every step, and leave its result out of the loss where you do not want it."
            )
        differentiable = x.requires_grad and torch.is_grad_enabled()
        shape = tuple(x.shape)
        mine = _Call(
            kind=_GATHER, step=self._step, batch=self._batch, number=len(self._found), differentiable=differentiable,
            dtype=_dtype_number(x), shape=shape,
        )  # fmt: skip
        rows = [each.shape[0] for each in self._agree(mine)]
        self._expect(x, rows, differentiable=differentiable)
        if differentiable:
            whole, anchor = _Gathered.apply(x, rows, self._group, self._begin_backward)
            self._anchors.append(anchor)
        else:
            whole = joined_rows(x.detach(), rows, self._group)
        start = sum(rows[: self._group.rank])
        # a copy, as the loss may write to what it gets
        self._found.append(_Found(whole=whole.detach().clone(), start=start, stop=start + shape[0]))
        return whole

    def _agree(self, mine: _Call) -> list[_Call]:
        """What every replica does. Raises an error on all of them if they do different things."""
        self._meet()
        part = torch.tensor(mine.to_numbers())
        everyone = part.new_empty(self._control.size * len(part))
        self._control.all_gather(everyone, part).wait()
        calls = [_Call.of_numbers(each) for each in everyone.view(self._control.size, -1).tolist()]
        calling = [rank for rank, each in enumerate(calls) if each.kind == _GATHER]
        if calling:
            _check_alike(calls, calling[0])
        return calls

    def _expect(self, x: Tensor, rows: Sequence[int], *, differentiable: bool) -> None:
        padded = max(rows) * x.shape[1:].numel()
        self._expected += Traffic.along("dp", all_gather=padded * x.itemsize)
        if differentiable:
            of_all = len(rows) * padded * _summed_in(x.dtype).itemsize
            self._expected += Traffic.along("dp", reduce_scatter=of_all)

    def _begin_backward(self) -> None:
        if self._answer is not _in_backward:
            raise JobError(
                f"The loss of step {self._step} takes a gradient itself, through meshloom.gather(): other replicas' losses are part of it, and not there yet. "
                "Take gradients of what comes before the gather."
            )
        self._meet()


_GATHER, _END, _EMPTY = range(3)
_DIMS = 10  # most of a tensor


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What a replica does: it gathers, ends its forward, or has no samples."""

    kind: int
    step: int = 0
    batch: int = 0
    number: int = 0
    differentiable: bool = False
    dtype: int = 0
    shape: tuple[int, ...] = ()

    def to_numbers(self) -> list[int]:
        shape = [*self.shape, *[0] * (_DIMS - len(self.shape))]
        return [self.kind, self.step, self.batch, self.number, int(self.differentiable), self.dtype, len(self.shape), *shape]  # fmt: skip

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> _Call:
        kind, step, batch, number, differentiable, dtype, ndim, *shape = numbers
        return _Call(
            kind=kind, step=step, batch=batch, number=number, differentiable=bool(differentiable), dtype=dtype, shape=tuple(shape[:ndim])
        )  # fmt: skip

    def __str__(self) -> str:
        name = str(_DTYPES[self.dtype]).removeprefix("torch.")
        return f"{name}{list(self.shape)}, {'with' if self.differentiable else 'without'} a gradient"


@dataclass(frozen=True)
class _Found:
    """The rows of all replicas, of which this one's are from `start` to `stop`."""

    whole: Tensor
    start: int
    stop: int


def _check_alike(calls: Sequence[_Call], calling: int) -> None:
    here = calls[calling]
    for rank, each in enumerate(calls):
        if each.kind == _EMPTY:
            raise PlanError(
                f"A batch of {here.batch} samples leaves replica {rank} of dp={len(calls)} without one, and meshloom.gather() needs a sample on every replica. "
                f"Use dp={min(here.batch, len(calls) - 1)} or less, or drop_last=True if this is the short last batch."
            )
        if each.kind == _END:
            raise JobError(
                f"In step {here.step} replica {calling} makes call {here.number + 1} of meshloom.gather(), and replica {rank} ends its forward without it. "
                "Every replica calls it equally often: call it outside of what depends on a replica's samples."
            )
        if (each.differentiable, each.dtype, each.shape[1:]) != (
            here.differentiable,
            here.dtype,
            here.shape[1:],
        ):
            raise JobError(
                f"Call {here.number + 1} of meshloom.gather() in step {here.step} is of {here} on replica {calling}, and of {each} on replica {rank}. "
                "All but the number of rows must be alike."
            )


def _refusal(plan: Plan, *, updates: bool) -> str:
    """Why no chunk of the plan can gather; "": it can."""
    entry = EXCHANGES[plan.exchange]
    if not updates or not entry.synchronous:
        return (
            "meshloom.gather() joins the samples of replicas that take a step together, and with exchange=async workers take none. "
            "Use exchange=all_reduce or server."
        )
    if plan.dp > 1 and entry.independent:
        return (
            f"meshloom.gather() joins the samples of replicas that hold the same parameters, and with exchange={plan.exchange} they do not. "
            "Use exchange=all_reduce or server."
        )
    if plan.microbatches > 1:
        return (
            f"meshloom.gather() joins the samples that are computed at the same time, one chunk of each replica, and with microbatches={plan.microbatches} "
            "they are computed one after another. Use microbatches=1."
        )
    return ""


def _in_backward(_: Tensor) -> Tensor:
    raise JobError(
        "meshloom.gather() is called in backward, where a checkpointed part of the forward runs again. Call it outside of torch.utils.checkpoint."
    )


def _in_metric(_: Tensor) -> Tensor:
    raise JobError(
        "it calls meshloom.gather(), and replicas evaluate batches of their own, not parts of one. Return what each sample gives, and compute the metric "
        "from that of all of them."
    )


# what a call is of, by number
_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def _dtype_number(x: Tensor) -> int:
    if x.dtype not in _DTYPES or x.ndim > _DIMS:
        known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise JobError(
            f"meshloom.gather() got {str(x.dtype).removeprefix('torch.')}{list(x.shape)}. It takes {known}, of up to {_DIMS} dims."
        )
    return _DTYPES.index(x.dtype)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, and an anchor: whatever depends on it makes gradients of the rows be sent."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Sequence[int], group: Group, begin: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.group, ctx.begin = rows, group, begin
        return joined_rows(x, rows, group), x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.begin()
        return summed_rows(grad_outputs[0], ctx.rows, ctx.group), None, None, None


class _Anchored(torch.autograd.Function):
    """`root`, whose backward reaches every anchor."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *anchors: Tensor) -> Tensor:
        ctx.number = len(anchors)
        return root.view_as(root)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0], *[None] * ctx.number


def joined_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """The rows of every rank's `x` [rows[rank], ...], in rank order: [sum of rows, ...], in memory of its own."""
    most, shape = max(rows), x.shape[1:]
    if not most * shape.numel():
        return x.new_empty(sum(rows), *shape)
    mine = x.contiguous()
    if len(x) < most:
        mine = torch.cat([mine, mine.new_zeros(most - len(x), *shape)])
    flat = mine.view(-1).view(torch.uint8)  # of any dtype
    everyone = flat.new_empty(group.size * len(flat))
    group.all_gather(everyone, flat).wait()
    parts = everyone.view(x.dtype).view(group.size, most, *shape)
    if min(rows) == most:
        return parts.flatten(0, 1)
    return torch.cat([part[:number] for part, number in zip(parts, rows, strict=True)])


def summed_rows(grad: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """This rank's rows of the sum of all ranks' `grad` [sum of rows, ...]: [rows[rank], ...]."""
    most, shape, number = max(rows), grad.shape[1:], rows[group.rank]
    if not most * shape.numel():
        return grad.new_empty(number, *shape)
    parts = grad.new_zeros(group.size, most, *shape, dtype=_summed_in(grad.dtype))
    for part, of_rank in zip(parts, grad.split(list(rows)), strict=True):
        part[: len(of_rank)] = of_rank
    flat = (torch.view_as_real(parts) if parts.is_complex() else parts).view(-1)
    mine = flat.new_empty(len(flat) // group.size)
    group.reduce_scatter(mine, flat).wait()
    own = torch.view_as_complex(mine.view(-1, 2)) if parts.is_complex() else mine
    return own.view(most, *shape)[:number].to(grad.dtype)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
