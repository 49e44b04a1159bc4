"""The training or evaluation mode of each module during training: the mode in which the model was built.

`from_pretrained` returns models in evaluation mode, and a training loop calls `model.train()`: so does
meshloom. Submodules in evaluation mode of a model in training mode were put there on purpose (batch norm with
frozen statistics), so they stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshloom.core.errors import TrainingError


def as_trained(model: nn.Module) -> nn.Module:
    """`model` in the modes in which it trains: a model in evaluation mode is put into training mode.

    >>> model = as_trained(nn.Sequential(nn.Dropout(), nn.Dropout().eval()))
    >>> [each.training for each in model.modules()]
    [True, True, False]
    >>> [each.training for each in as_trained(model.eval()).modules()]
    [True, True, True]
    """
    return model if model.training else model.train()


class Modes:
    """The modes of the modules of a model that is `as_trained`, restored in every step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built = [(name, module, module.training) for name, module in model.named_modules()]
        self._modes = [trains for *_, trains in self._built]
        self._left = self._now()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Put every module into its training-time mode, whatever was called between steps.

        Raises `TrainingError` if a part of the model was put into evaluation mode since the last step, which
        programs that are already captured could not follow.
        """
        if self._now() != self._modes:
            self._restore()
        try:
            yield
        finally:
            self._left = self._now()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put all modules into evaluation mode, and restore their modes at the end of the context."""
        before = self._now()
        self._model.eval()
        try:
            yield
        finally:
            for (_, module, _), training in zip(self._built, before, strict=True):
                module.training = training

    def _restore(self) -> None:
        if self._model.training:
            for (name, module, trains), left in zip(self._built, self._left, strict=True):
                if trains and left and not module.training:
                    raise TrainingError(
                        f"{name} was put into evaluation mode between two steps, and the rest of the model was not. Modules train in the mode in which "
                        "Job(model=...) returned them: set its mode there, or build a new Trainer from a job that does."
                    )
        for _, module, trains in self._built:
            if module.training is not trains:
                module.training = trains

    def _now(self) -> list[bool]:
        return [module.training for _, module, _ in self._built]
