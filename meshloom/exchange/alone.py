"""The exchange of a single replica: gradients stay in `.grad` and are divided by the weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshloom.core.losses.loss_sum import Divisor, divides
from meshloom.core.step_shape import StepShape
from meshloom.exchange.exchange import Emit, Exchange, Ownership, Ready, Slice
from meshloom.program.operators.fused_grad_accumulation import GradBuffer
from meshloom.telemetry.traffic import ExpectedBytes


class Unbuffered(Exchange):
    """An exchange that takes gradients where autograd leaves them, whenever a chunk ends."""

    def end_chunk(self) -> None:
        pass

    def buffer(self, parameter: Tensor) -> GradBuffer | None:
        return None


class Alone(Unbuffered):
    """The exchange of plans with dp=1, and of ranks that update no parameters. Every replica owns all of its
    parameters."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._owned = [Slice(name, parameter, 0, parameter.numel()) for name, parameter in named]
        self.ownership = Ownership(owned=self._owned)

    def begin(self, shape: StepShape) -> None:
        for slice_ in self._owned:
            slice_.parameter.grad = None

    def hook(self, parameter: nn.Parameter) -> Ready | None:
        return None

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        present = [slice_.parameter.grad for slice_ in self._owned if slice_.parameter.grad is not None]
        for index, gradient in enumerate(present):
            if gradient.layout != torch.strided:
                present[index] = gradient.to_dense()
        if present and divides(weight):
            torch._foreach_div_(present, weight)  # pyright: ignore[reportPrivateUsage]
        dense = iter(present)
        return [None if slice_.parameter.grad is None else next(dense).reshape(-1) for slice_ in self._owned]

    def publish(self) -> bool:
        return False

    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        for slice_, each in zip(self._owned, gradients, strict=True):
            emit(slice_.name, None if each is None else each.view(slice_.parameter.shape))

    def expected_bytes(self) -> ExpectedBytes:
        return ExpectedBytes()
