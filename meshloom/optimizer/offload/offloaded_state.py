"""The contract of optimizer state that is kept elsewhere than with the parameters: updates are made where it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer


class OffloadedState(ABC):
    """The state of a rank's optimizers."""

    def open(self, files: Path | None) -> None:  # noqa: B027
        """Called once, before the first update. files: the run's directory, if it has one. Raises `PlanError` if there
        is no room."""

    def close(self) -> None:  # noqa: B027
        """Called after the last update. The state lasts as long as the optimizers."""

    def begin_step(self) -> None:  # noqa: B027
        """Called before gradients are computed."""

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer updates in place of a parameter."""
        return parameter

    @abstractmethod
    def step(self, optimizer: Optimizer) -> None:
        """One update of all of its parameters."""

    def keep(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:  # noqa: B027
        """Called when state of a parameter was made outside an update."""

    def keep_all(self) -> None:  # noqa: B027
        """Called when state of any parameter may have been read, changed or made outside an update."""

    def let_go(self, tensor: Tensor) -> None:  # noqa: B027
        """Called when a save has read some of a tensor, which need not stay in memory for it."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What the user should know before the first step."""
