"""Exponential moving averages of the trainable parameters, in slices: each rank keeps those of what it owns.

    after each update    average = decay * average + (1 - decay) * parameter, at first the parameter
    evaluation           the owners put averages in place of parameters, the exchange publishes them, and back

As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, updated after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.format import AVERAGE
from meshloom.exchange.exchange import Exchange, Slice
from meshloom.optimizer.state_pieces import OwnedSlice, Read, load_copies
from meshloom.parameters.shards import Shards

_torch: Any = torch


class ParameterAverages:
    """Of what `exchange` says this rank owns. shards: how parameters are sharded over tp. held: the averages, as
    checkpoints keep them. started: whether there are any, from the first update on."""

    def __init__(self, decay: float, exchange: Exchange, shards: Shards) -> None:
        self.decay, self._exchange, self._shards = decay, exchange, shards
        self.held: Sequence[OwnedSlice] = ()
        self.started = False  # on all ranks, also those that own nothing

    def update(self) -> None:
        """After a step's update."""
        owned = [each.read() for each in self._exchange.ownership.owned]
        if not self.started:
            self._start()
        elif owned:
            _torch._foreach_lerp_([each.tensor.data for each in self.held], owned, 1 - self.decay)

    def show(self) -> Callable[[], None]:
        """Replaces the parameters by their averages. Returns what puts this rank's own values back, after which they are to
        be published once more."""
        slices = self._exchange.ownership.owned
        own = [each.read().clone() for each in slices]
        _set(slices, [each.tensor.data for each in self.held])
        self.publish()
        return lambda: _set(slices, own)

    def publish(self) -> None:
        """Make what this rank owns visible on all."""
        self._exchange.publish()

    def load(self, path: str, shape: Sequence[int], read: Read) -> None:
        """Take a parameter's average from a checkpoint."""
        if not self.started:
            self._start()
        load_copies(self.held, path, shape, read, AVERAGE)

    def _start(self) -> None:
        self.started, self.held = True, self._copies()

    def _copies(self) -> list[OwnedSlice]:
        found: list[OwnedSlice] = []
        for each in self._exchange.ownership.owned:
            divided = each.name in self._shards.pieces
            shape = self._shards.whole_shape(each.name, each.parameter)
            tensor = nn.Parameter(each.read().clone(), requires_grad=False)
            found.append(
                OwnedSlice(
                    each.name,
                    tensor,
                    each.start,
                    each.stop,
                    tuple(shape),
                    shards=self._shards if divided else None,
                )
            )
        return found


def _set(slices: Sequence[Slice], values: Sequence[Tensor]) -> None:
    for slice_, value in zip(slices, values, strict=True):
        slice_.write(value)
