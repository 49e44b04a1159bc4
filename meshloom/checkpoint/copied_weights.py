"""Weights of a checkpoint with the copies that its state keeps in their place: float32 masters, or moving averages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import AVERAGE, MASTER, STATE
from meshloom.core.errors import CheckpointError

TIED = (
    "tied"  # of a checkpoint's values: other names of its tensors, with the names that they have in its state
)


def tied_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """What a checkpoint says of parameters with several names: {} if there are none."""
    first = {id(each): name for name, each in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    others = {name: first[id(each)] for name, each in every if first[id(each)] != name}
    return {TIED: others} if others else {}


class CopiedWeights:
    """Parameters and buffers in full shape, each read as it is touched; those without a copy are what they are.

    kind: `MASTER` or `AVERAGE`. entries: of all, by name. kept: names of those that are bfloat16 and have no master. Raises
    `CheckpointError` for a checkpoint without such copies.
    """

    def __init__(self, checkpoint: Checkpoint, kind: str) -> None:
        self.kind = kind
        self._checkpoint, self._stored = checkpoint, checkpoint.stored_weights()
        keys = {key for key in checkpoint.keys() if key.endswith(f"/{kind}")}  # noqa: SIM118
        if not keys:
            raise CheckpointError(_lacking(checkpoint, kind))
        tied: Mapping[str, str] = checkpoint.values.get(TIED, {})
        of_names = {name: f"{STATE}{tied.get(name, name)}/{kind}" for name in self._stored.entries}
        self._keys = {name: key for name, key in of_names.items() if key in keys}
        self.entries = {
            name: replace(each, dtype=checkpoint.read(self._keys[name], 0, 1).dtype)
            if name in self._keys
            else each
            for name, each in self._stored.entries.items()
        }
        is_low = [name for name, each in self.entries.items() if each.dtype == torch.bfloat16]
        self.kept = is_low if kind == MASTER else []

    def tensor(self, name: str) -> Tensor:
        """In full shape, on the CPU."""
        if name not in self._keys:
            return self._stored.tensor(name)
        shape = self.entries[name].shape
        return self._checkpoint.read(self._keys[name], 0, math.prod(shape)).view(shape)

    def whole(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.tensor(name) for name in self.entries}


def _lacking(checkpoint: Checkpoint, kind: str) -> str:
    if kind == AVERAGE:
        return f"{checkpoint.path} has no averages of parameters. Let the job's optimizer function return ml.Averaged(optimizer, 0.999), or export without --average."
    return f"{checkpoint.path}, saved under {checkpoint.plan_text}, has no masters: runs with precision=bf16 keep them. Export without --masters."
