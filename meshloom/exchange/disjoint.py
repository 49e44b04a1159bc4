"""Exchanges of disjoint parameters as one: of those with dense gradients and of those with sparse ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from meshloom.core.losses.loss_sum import Divisor
from meshloom.core.step_shape import StepShape
from meshloom.exchange.exchange import Emit, Exchange, Memory, Ownership, Ready
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes

T = TypeVar("T", bound=Exchange)


@dataclass(frozen=True, kw_only=True, eq=False)
class OfSome:
    """named: the parameters whose gradients `exchange` takes."""

    exchange: Exchange
    named: Sequence[tuple[str, nn.Parameter]]


class Disjoint(Exchange):
    """Each part exchanges the gradients of its own parameters."""

    def __init__(self, parts: Sequence[OfSome]) -> None:
        self.parts = parts
        self._of = {id(parameter): part.exchange for part in parts for _, parameter in part.named}
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
        for each in self.parts:
            each.exchange.begin(shape)

    def end_chunk(self) -> None:
        for each in self.parts:
            each.exchange.end_chunk()

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        exchange = self._of.get(id(parameter))
        return exchange.buffer(parameter) if exchange else None

    def hook(self, parameter: nn.Parameter) -> Ready | None:
        exchange = self._of.get(id(parameter))
        return exchange.hook(parameter) if exchange else None

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        return [gradient for each in self.parts for gradient in each.exchange.finish(weight)]

    def publish(self) -> bool:
        changed = [each.exchange.publish() for each in self.parts]  # all of them
        return any(changed)

    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        rest = gradients
        for each in self.parts:
            number = len(each.exchange.ownership.owned)
            mine, rest = rest[:number], rest[number:]
            each.exchange.gather(mine, emit)

    def expected_bytes(self) -> ExpectedBytes:
        return sum((each.exchange.expected_bytes() for each in self.parts), ExpectedBytes())


def parts_of(exchange: Exchange, kind: type[T]) -> list[T]:
    """Those of this class that an exchange is made of."""
    parts = [each.exchange for each in exchange.parts] if isinstance(exchange, Disjoint) else [exchange]
    return [each for each in parts if isinstance(each, kind)]
