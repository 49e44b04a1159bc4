"""The contract of a stage on its rank: forwards and backwards of microbatches, in the order of a schedule's actions.

ProgramStage    runs programs of a part of the loss (`program_stage.py`)
ModuleStage     calls the loss as it is written; the only stage (`replica/module_stages.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor


class StageRun(ABC):
    """What a stage keeps of a microbatch lives from its forward to its backward."""

    @abstractmethod
    def forward(self, microbatch: int) -> Mapping[str, Tensor]:
        """Forward of a microbatch whose inputs have arrived; returns the values to send."""

    @abstractmethod
    def backward(self, microbatch: int) -> Mapping[str, Tensor]:
        """Backward of a microbatch whose gradients have arrived; returns its inputs' gradients, or zeros."""

    @abstractmethod
    def clear(self) -> None:
        """Drops what it keeps of microbatches."""

    # --- Where there are other stages, or backwards in two halves.

    def receive(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Accepts values of an earlier stage; they become leaves here."""
        raise NotImplementedError

    def receive_gradients(self, microbatch: int, gradients: Mapping[str, Tensor]) -> None:
        """Accepts gradients of sent values, from one of the stages that received them."""
        raise NotImplementedError

    def input_gradients(self, microbatch: int) -> Mapping[str, Tensor]:
        """The first half of a backward: the same, without the weight gradients."""
        raise NotImplementedError

    def weight_gradients(self, microbatch: int) -> Mapping[str, Tensor]:
        """The second half: the weight gradients."""
        raise NotImplementedError
