"""One rank of a random program: it lays its tensors out, starts and waits, and compares what it finds in
memory with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from collective_oracle import expected
from collective_programs import COMPLEX, FLOATS, Call, Program
from torch import Tensor
from warm_ranks import WarmRank

from meshloom.comm.group import Work


def run_programs(warm: WarmRank, programs: Sequence[Program], tiny: bool = False) -> list[str]:
    """What is wrong on this rank, which goes from one to the next without waiting for the others."""
    return [
        problem
        for number, program in enumerate(programs)
        for problem in run_program(warm, program, tiny, number * 100)
    ]


def run_program(warm: WarmRank, program: Program, tiny: bool = False, first_tag: int = 0) -> list[str]:
    """What is wrong on this rank. After each wait its tensors are overwritten: no other rank may still need
    them. tiny: see `WarmRank.kept`."""
    problems: list[str] = []
    for calls, orders in zip(program.rounds, program.orders, strict=True):
        started = [
            start(warm, call, tiny, first_tag) if warm.rank in call.members else None for call in calls
        ]
        for index in orders[warm.rank]:
            if running := started[index]:
                problems += running.finish()
    return problems


@dataclass(kw_only=True)
class Frame:
    """A tensor and the memory that it is a view of: elements beside it must stay what they are.

    view: the tensor of a base. wanted: what it is to hold in the end.
    """

    base: Tensor
    view: Callable[[Tensor], Tensor]
    wanted: Tensor | None
    before: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.base.clone()

    @property
    def tensor(self) -> Tensor:
        """As handed to the group."""
        return self.view(self.base)

    def problem(self, exact: bool) -> str:
        """What is wrong, or nothing. Overwrites the tensor."""
        if self.wanted is not None:
            same = (
                torch.equal(self.tensor, self.wanted)
                if exact
                else torch.allclose(self.tensor, self.wanted, rtol=1e-5, atol=1e-6)
            )
            if not same:
                return f"{_shown(self.tensor)} instead of {_shown(self.wanted)}"
        self.view(self.base).zero_()
        self.view(self.before).zero_()
        rest, was = self.base.contiguous(), self.before.contiguous()
        return (
            ""
            if torch.equal(rest.view(-1).view(torch.uint8), was.view(-1).view(torch.uint8))
            else "elements beside the tensor have changed"
        )


@dataclass(kw_only=True)
class Running:
    """A started call. source: that a message must come from."""

    call: Call
    place: int
    work: Work
    frames: list[Frame]
    source: int | None = None

    def finish(self) -> list[str]:
        """Wait; what is wrong."""
        self.work.wait()
        problems = []
        if self.source is not None and (found := getattr(self.work, "source")) != self.source:  # noqa: B009
            problems.append(f"comes from {found} instead of {self.source}")
        # (a + bi)(c + di) may be rounded once or twice
        exact = not (self.call.dtype in COMPLEX and self.call.op == "product")
        problems += [problem for frame in self.frames if (problem := frame.problem(exact))]
        return [f"{self.call} on rank {self.place} of the group: {problem}" for problem in problems]


def start(warm: WarmRank, call: Call, tiny: bool, first_tag: int) -> Running:
    """This rank's part of a call."""
    group, window = warm.kept(call.members, tiny)
    place = call.members.index(warm.rank)
    memory, used = window.of(place), call.place_bytes

    def lay(values: Tensor, wanted: Tensor | None) -> Frame:
        nonlocal used
        layout = call.layouts[place]
        if layout == "window" and used + values.nbytes <= memory.numel():
            base = memory[used : used + values.nbytes].view(values.dtype).view(values.shape)
            used += values.nbytes
            base.copy_(values)
            return Frame(base=base, view=lambda whole: whole, wanted=wanted)
        return lay_out(values, layout, wanted)

    def give(values: Tensor) -> Frame:
        return lay(values, values)

    def take(wanted: Tensor) -> Frame:
        return lay(torch.zeros_like(wanted), wanted)

    values, result = call.input_of(place), expected(call, place)
    n, root, is_root = len(call.members), call.root, call.root == place
    frames: list[Frame] = []
    source: int | None = None
    work: Work
    operation: Any = getattr(group, call.kind, None)
    match call.kind:
        case "all_reduce":
            frames = [lay(values, result)]
            work = operation(frames[0].tensor, call.op)
        case "reduce":
            frames = [lay(values, result if is_root else values)]
            work = operation(frames[0].tensor, root, call.op)
        case "broadcast":
            frames = [lay(values, result)]
            work = operation(frames[0].tensor, root)
        case "reduce_scatter":
            assert result is not None
            frames = [give(values), take(result)]
            work = operation(frames[1].tensor, frames[0].tensor, call.op)
        case "all_gather":
            assert result is not None
            frames = [give(values), take(result)]
            work = operation(frames[1].tensor, frames[0].tensor)
        case "gather":
            frames = [
                give(values),
                *(take(each) for each in (result.reshape(n, *call.shape) if result is not None else ())),
            ]
            work = operation(
                [frame.tensor for frame in frames[1:]] if is_root else None, frames[0].tensor, root
            )
        case "scatter":
            assert result is not None
            frames = [
                take(result),
                *(give(each) for each in (values.reshape(n, *call.shape) if is_root else ())),
            ]
            work = operation(
                frames[0].tensor, [frame.tensor for frame in frames[1:]] if is_root else None, root
            )
        case "all_to_all":
            assert result is not None
            frames = [give(values), take(result)]
            received, sent = [row[place] for row in call.sizes], call.sizes[place]
            work = operation(frames[1].tensor, frames[0].tensor, received, sent)
        case "message" if is_root:
            frames = [give(values)]
            work = group.send(frames[0].tensor, call.to, call.tag + first_tag)
        case "message" if place == call.to:
            assert result is not None
            frames, source = [take(result)], root
            work = group.recv(frames[0].tensor, None if call.any_source else root, call.tag + first_tag)
        case "message":
            work = _Nothing()
        case _:
            work = group.barrier()
    return Running(call=call, place=place, work=work, frames=frames, source=source)


def lay_out(values: Tensor, layout: str, wanted: Tensor | None) -> Frame:
    """The same values, with other strides and offsets; gaps are filled."""
    shape, count = values.shape, values.numel()
    view: Callable[[Tensor], Tensor] = lambda base: base  # noqa: E731
    base_shape: tuple[int, ...] = shape
    match layout:
        case "offset":  # begins in the middle of a cache line
            base_shape = (count + 3,)
            view = lambda base: base[1 : 1 + count].view(shape)  # noqa: E731
        case "transposed":
            base_shape = tuple(reversed(shape))
            view = lambda base: base.permute(tuple(reversed(range(base.ndim))))  # noqa: E731
        case "every_other":
            base_shape = (*shape, 2)
            view = lambda base: base[..., 0]  # noqa: E731
        case "lazy":  # its memory holds the conjugate, or the negative
            if values.dtype in COMPLEX:
                view = torch.conj
            elif values.dtype in FLOATS:
                view = torch._neg_view
        case _:
            pass
    base = torch.ones(base_shape, dtype=values.dtype)
    view(base).copy_(values)
    return Frame(base=base, view=view, wanted=wanted)


class _Nothing(Work):
    def wait(self) -> None:
        pass

    def is_finished(self) -> bool:
        return True


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.flatten()[:8].tolist()}"
