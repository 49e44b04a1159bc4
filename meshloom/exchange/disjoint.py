"""Exchanges of disjoint parameters as one: of those with dense gradients and those with sparse ones, and of
each of several losses, which steps take in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, nn

from meshloom.core.losses.loss_scale import Divisor
from meshloom.core.step_shape import StepShape
from meshloom.exchange.exchange import Emit, Exchange, Memory, Ownership, Ready
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

T = TypeVar("T", bound=Exchange)


@dataclass(frozen=True, kw_only=True, eq=False)
class OfSome:
    """named: the parameters whose gradients `exchange` takes. loss: number of the one whose turns these are;
    None: every turn."""

    exchange: Exchange
    named: Sequence[tuple[str, nn.Parameter]]
    loss: int | None = None


class Disjoint(Exchange):
    """Of the parts whose turn it is gradients are exchanged; nothing is sent of the others, whose gradients
    are None."""

    def __init__(self, parts: Sequence[OfSome]) -> None:
        self.parts, self._now = parts, list(parts)
        self._part = {id(parameter): part for part in parts for _, parameter in part.named}
        self._turns = [0] * len(parts)  # of each so far
        several = [each.exchange.ownership for each in parts]
        apart: list[Memory] = [each.memory for each in several if each.memory != "whole"]
        self.ownership = Ownership(
            owned=[slice_ for each in several for slice_ in each.owned],
            owners=next((each.owners for each in several if each.owners is not None), None),
            num_owners=max(each.num_owners for each in several),
            memory=apart[0] if apart else "whole",
            independent=any(each.independent for each in several),
            each_chunk=any(each.each_chunk for each in several),
        )

    def begin(self, shape: StepShape) -> None:
        self._now = [each for each in self.parts if each.loss in (None, shape.loss)]
        for number, each in enumerate(self.parts):
            self._turns[number] += each in self._now
        for each in self._now:
            each.exchange.begin(shape)

    def begin_chunk(self) -> None:
        for each in self._now:
            each.exchange.begin_chunk()

    def end_chunk(self) -> None:
        for each in self._now:
            each.exchange.end_chunk()

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        part = self._part.get(id(parameter))
        return part.exchange.buffer(parameter) if part and part in self._now else None

    def hook(self, parameter: nn.Parameter) -> Ready | None:
        part = self._part.get(id(parameter))  # None: no loss trains it
        ready = part.exchange.hook(parameter) if part else None
        if ready is None or part is None or part.loss is None:
            return ready
        # not of others, which programs report for every chunk
        return lambda parameter: ready(parameter) if parameter.requires_grad else None

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for each in self.parts:
            none = [None] * len(each.exchange.ownership.owned)
            gradients += each.exchange.finish(weight) if each in self._now else none
        return gradients

    def publish(self) -> bool:
        changed = [each.exchange.publish() for each in self._now]  # all of them
        return any(changed)

    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        rest = gradients
        for each in self.parts:
            number = len(each.exchange.ownership.owned)
            mine, rest = rest[:number], rest[number:]
            if each in self._now:
                each.exchange.gather(mine, emit)
            else:
                for name, _ in each.named:
                    emit(name, None)

    def expected_bytes(self) -> ExpectedBytes:
        found = ExpectedBytes()
        for each, turns in zip(self.parts, self._turns, strict=True):
            own = each.exchange.expected_bytes()
            if each.loss is not None:
                own = replace(own, per_step=Traffic(), so_far=own.so_far + own.per_step * turns)
            found += own
        return found


def parts_of(exchange: Exchange, kind: type[T]) -> list[T]:
    """Those of this class that an exchange is made of."""
    parts = [each.exchange for each in exchange.parts] if isinstance(exchange, Disjoint) else [exchange]
    return [each for each in parts if isinstance(each, kind)]
