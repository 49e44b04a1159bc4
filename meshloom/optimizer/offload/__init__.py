"""Optimizer state that is kept elsewhere than with the parameters: in a file, or that of a GPU in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from meshloom.core.device.lanes import lane_of
from meshloom.optimizer.offload.disk import StateOnDisk, directory_for
from meshloom.optimizer.offload.host import StateOnHost
from meshloom.optimizer.offload.offloaded_state import OffloadedState

__all__ = ["OffloadedState", "directory_for", "offload_state"]


def offload_state(
    optimizers: Sequence[Optimizer], in_windows: Sequence[bool], device: torch.device
) -> OffloadedState:
    """The state of these optimizers elsewhere. in_windows: whether each may be stepped in windows. device: of the
    parameters."""
    if device.type == "cpu":
        return StateOnDisk(optimizers, in_windows)
    return StateOnHost(optimizers, in_windows, device, lane_of(device), lane_of(device))
