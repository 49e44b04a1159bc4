"""DiLoCo: rounds of local steps, at the end of which an outer optimizer steps on how far the replicas moved
on average.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023),
    algorithm 1.

    d  =  parameters at the round's beginning - mean of the replicas' parameters       (lines 10-12)
    momentum  <-  outer_momentum * momentum + d                                        Nesterov (line 14)
    parameters  <-  those at the beginning - outer_learning_rate * (d + outer_momentum * momentum)

With outer_learning_rate=1 and outer_momentum=0 this is local SGD. The parameters at the beginning and the
momentum take as much memory as two models on each replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshloom.exchange.exchange import Exchange
from meshloom.exchange.local_sgd import RoundEnd, open_local_sgd, rounds_of
from meshloom.exchange.registry import Named, Setup


def open_diloco(setup: Setup) -> Exchange:
    """The exchange with the plan's outer optimizer."""
    return open_local_sgd(
        setup, OuterStep(learning_rate=setup.plan.outer_learning_rate, momentum=setup.plan.outer_momentum)
    )


class OuterStep(RoundEnd):
    """momentum: of each parameter, by name; empty before the end of the first round."""

    def __init__(self, *, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._beginning: list[Tensor] = []
        self.momentum: Mapping[str, Tensor] = {}

    def begin(self, named: Named) -> None:
        self._beginning = [parameter.detach().clone() for _, parameter in named]

    def end(self, named: Named, means: Sequence[Tensor]) -> None:
        if not self.momentum:
            self.momentum = {name: torch.zeros_like(parameter.detach()) for name, parameter in named}
        for (name, parameter), beginning, mean in zip(named, self._beginning, means, strict=True):
            change = beginning - mean.to(beginning)
            momentum = self.momentum[name].mul_(self._momentum).add_(change)
            parameter.data.copy_(beginning - self._learning_rate * (change + self._momentum * momentum))
        self._beginning = []


def outer_of(exchange: Exchange) -> OuterStep | None:
    """The outer optimizer, whose momentum checkpoints save; None: there is none."""
    rounds = rounds_of(exchange)
    return rounds.end if rounds is not None and isinstance(rounds.end, OuterStep) else None
