"""How much state torch's optimizers keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import ASGD, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop


def tensors_per_parameter(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """Tensors of state that are as large as their parameter, by the optimizer's class."""
    kind = type(optimizer)
    if kind is SGD:
        return int(group["momentum"] != 0)
    if kind in (Adam, AdamW):
        return 2 + int(group["amsgrad"])
    if kind is RMSprop:
        return 1 + int(group["momentum"] > 0) + int(group["centered"])
    if kind in (Adagrad, ASGD, Muon):
        return 1
    return 0 if kind is Adafactor else 2  # rows and columns
