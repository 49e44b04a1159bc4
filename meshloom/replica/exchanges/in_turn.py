"""An exchange for each of several losses: the gradients of the one whose turn it is are exchanged, in buckets of
its own parameters, and nothing is sent of the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor, nn

from meshloom.core.losses.loss_scale import Divisor
from meshloom.exchange.exchange import Emit, Exchange, Ownership
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class InTurn(Exchange):
    """`inner`: by number of the loss, each of parameters of its own, which `names` names."""

    def __init__(self, inner: Sequence[Exchange], names: Sequence[Sequence[str]]) -> None:
        self._inner, self._names = list(inner), names
        self._turn = 0
        several = [each.ownership for each in inner]
        self.ownership = Ownership(
            owned=[slice_ for each in several for slice_ in each.owned],
            owners=next((each.owners for each in several if each.owners is not None), None),
            num_owners=max(each.num_owners for each in several),
            memory=next((each.memory for each in several if each.memory != "whole"), "whole"),
            each_chunk=any(each.each_chunk for each in several),
        )
        self._steps = [0] * len(inner)  # of each so far

    @property
    def _now(self) -> Exchange:
        return self._inner[self._turn]

    def open(self) -> None:
        for each in self._inner:
            each.open()

    def turn_to(self, loss: int) -> None:
        self._turn = loss

    def begin_step(self) -> None:
        self._steps[self._turn] += 1
        self._now.begin_step()

    def wait_for_nothing(self) -> None:
        self._now.wait_for_nothing()

    def chunk(self) -> AbstractContextManager[None]:
        return self._now.chunk()

    def end_chunks(self) -> None:
        self._now.end_chunks()

    def begin_last_chunk(self) -> None:
        self._now.begin_last_chunk()

    def grad_buffer(self, parameter: Tensor) -> GradBuffer | None:
        return self._now.grad_buffer(parameter)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:  # not of others, which programs report for every chunk
            self._now.gradient_ready(parameter)

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        mine = self._now.finish(weight)
        return [
            gradient
            for each in self._inner
            for gradient in (mine if each is self._now else [None] * len(each.ownership.owned))
        ]

    def publish(self) -> None:
        self._now.publish()

    def each_gradient(self, gradients: list[Tensor | None], emit: Emit) -> None:
        start = sum(len(each.ownership.owned) for each in self._inner[: self._turn])
        self._now.each_gradient(gradients[start : start + len(self._now.ownership.owned)], emit)
        for number, names in enumerate(self._names):
            for name in names if number != self._turn else ():
                emit(name, None)

    def expected_bytes(self) -> ExpectedBytes:
        found = ExpectedBytes()
        for each, steps in zip(self._inner, self._steps, strict=True):
            own = each.expected_bytes()
            found += replace(own, per_step=Traffic(), so_far=own.so_far + own.per_step * steps)
        return found

    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for each in self._inner for note in each.notes()))
