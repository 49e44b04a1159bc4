"""Replicas of a stage without parameters of its own have nothing to agree on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from meshloom.comm.steps import Steps
from meshloom.exchange.exchange import Exchange, Give, Slice


class Nothing(Exchange):
    """The exchange of ranks that update nothing."""

    @property
    def owned(self) -> Sequence[Slice]:
        return []

    @property
    def owners(self) -> None:
        return None

    @property
    def one_copy(self) -> bool:
        return False

    def open(self) -> Steps[None]:
        return
        yield

    def begin_step(self) -> None:
        pass

    def begin_last_chunk(self) -> None:
        pass

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        raise AssertionError("no parameter is updated here")

    def room(self, parameter: Tensor) -> None:
        return None

    def finish(self, weight: Tensor) -> Steps[list[Tensor | None]]:
        return []
        yield

    def publish(self) -> Steps[None]:
        return
        yield

    def each_gradient(self, gradients: list[Tensor | None], give: Give) -> Steps[None]:
        return
        yield

    def bytes_per_step(self) -> dict[str, int]:
        return {}

    def bytes_once(self) -> dict[str, int]:
        return {}
