"""What torch, `random` and numpy draw in a module's call belongs to the call and its replica, so that the script's own draws stay alike on all ranks,
whatever sizes their shares have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshloom.core.random import derive, draws_apart, python_draws_of, seed_torch


class CallDraws:
    """Of one module. replica: whose share it is called with."""

    def __init__(self, replica: int) -> None:
        self._replica, self._calls = replica, 0

    @contextmanager
    def of_a_call(self) -> Iterator[None]:
        """Around the next call: it draws from the script's seed (`torch.manual_seed`), its own number and the replica's."""
        seed = derive(torch.default_generator.initial_seed(), "call", self._calls, self._replica)
        self._calls += 1
        with draws_apart(), python_draws_of(seed):
            seed_torch(seed)
            yield
