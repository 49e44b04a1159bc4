"""The exchange of a single replica: gradients stay in `.grad` and are divided by the weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshloom.core.losses.loss_scale import Divisor, divides
from meshloom.exchange.exchange import Emit, Exchange, Ownership, Slice


class Alone(Exchange):
    """The exchange of plans with dp=1, within local steps, and of ranks that update no parameters."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._owned = [Slice(name, parameter, 0, parameter.numel()) for name, parameter in named]
        self.ownership = Ownership(owned=self._owned)

    def begin_step(self) -> None:
        for slice_ in self._owned:
            slice_.parameter.grad = None

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        present = [slice_.parameter.grad for slice_ in self._owned if slice_.parameter.grad is not None]
        for index, gradient in enumerate(present):
            if gradient.layout != torch.strided:
                present[index] = gradient.to_dense()
        if present and divides(weight):
            torch._foreach_div_(present, weight)  # pyright: ignore[reportPrivateUsage]
        dense = iter(present)
        return [None if slice_.parameter.grad is None else next(dense).reshape(-1) for slice_ in self._owned]

    def each_gradient(self, gradients: list[Tensor | None], emit: Emit) -> None:
        for slice_, each in zip(self._owned, gradients, strict=True):
            emit(slice_.name, None if each is None else each.view(slice_.parameter.shape))
