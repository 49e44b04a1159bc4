"""The contract of what a plan makes of a module's calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

from torch import Tensor

from meshloom.core.job import LossFunction
from meshloom.loops.call_weight import Weight

Cutting = int | Literal["part"] | None  # of an input, as of `parallel`


class StepLoss(NamedTuple):
    """Of a share: the sum and what it counts; whether the loss is a mean over samples."""

    total: Tensor
    weight: Tensor
    is_mean: bool


class Execution(ABC):
    """Of one parallel module on one rank. Every rank of a replica makes the same calls with the same inputs; ranks of other
    replicas the same calls with their own. running: a call of the module, within which others run as written. weight: as of `parallel`."""

    running = False
    weight: Weight | None = None

    @abstractmethod
    def call(
        self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward"
    ) -> Any:  # fmt: skip
        """What the module's method returns for these inputs, whole on every rank of the replica; in grad mode a backward through it
        leaves in each parameter's `.grad` this rank's part of the gradient of the global batch.

        compute: the method as it is written; of `forward`, the module's own call, hooks and all.
        """

    def step(self, loss: LossFunction, batch: Any) -> StepLoss | None:
        """The loss of the module and a batch, with its gradients computed in the order that suits the plan: they are there when autograd comes to
        it. None: there is no better order than that of autograd."""
        return None

    @abstractmethod
    def accumulating(self) -> AbstractContextManager[None]:
        """A context whose backwards need not leave gradients that are complete: the first one after it does, for all of them."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """A context in which parameters and their gradients are whole on every rank; what is written to them is kept. All ranks enter
        and leave it together."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """The entries of the module's state dict in its order, each with what gathers it, whole, on every rank."""

    def check_complete(self) -> None:  # noqa: B027
        """Before an update. Raises `TrainingError` where gradients are not those of the global batch yet."""

    def refresh(self) -> None:  # noqa: B027
        """Before a backward within a call, which may have unfrozen parameters."""

    def stepped(self) -> None:  # noqa: B027
        """After an update, which a call of the module may have made within."""

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors that all replicas have alike between steps, by name."""
        return ()

    def take_notes(self) -> list[str]:
        """For the user, each once."""
        return []

    @property
    def is_whole(self) -> bool:
        """Within `whole` of what ranks of a replica divide, where calls are each rank's own."""
        return False

    @property
    def backwards(self) -> int:
        """Backwards whose gradients ranks have added up."""
        return 0
