"""The mode in which each module trains: as the model was built; a model handed over in evaluation mode trains
in training mode.

`from_pretrained` returns whole models in evaluation mode, and whoever trains them calls `model.train()`: so
does meshloom. Modules that are in evaluation mode when the whole model is not were put there on purpose
(batch norm that keeps its statistics), so they stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshloom.core.errors import TrainingError


def as_trained(model: nn.Module) -> nn.Module:
    """`model` in the mode that it trains in. Its own `training` is the whole model's, whatever that of a new
    part put into it.

    >>> model = as_trained(nn.Sequential(nn.Dropout(), nn.Dropout().eval()))
    >>> [each.training for each in model.modules()]
    [True, True, False]
    >>> [each.training for each in as_trained(model.eval()).modules()]
    [True, True, True]
    """
    return model if model.training else model.train()


class Modes:
    """The modes of the modules of a model that is `as_trained`, kept from step to step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built = [(name, module, module.training) for name, module in model.named_modules()]
        self._left = self._now()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Every module is in the mode that it trains in, whatever was called between steps (`model.eval()`,
        `model.train()`).

        Raises `TrainingError` if a part of the model was put into evaluation mode since the newest step:
        programs that were read before would not know.
        """
        if self._model.training:
            for (name, module, trains), left in zip(self._built, self._left, strict=True):
                if trains and left and not module.training:
                    raise TrainingError(
                        f"{name} was put into evaluation mode between two steps, and the rest of the model was not. Modules train in the mode in which "
                        "Job(model=...) returned them: put it there, or build a new Trainer from a job that does."
                    )
        self._restore()
        try:
            yield
        finally:
            self._left = self._now()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """All modules are in evaluation mode; afterwards each is in the mode that it was in."""
        before = self._now()
        self._model.eval()
        try:
            yield
        finally:
            for (_, module, _), training in zip(self._built, before, strict=True):
                module.training = training

    def _restore(self) -> None:
        for _, module, trains in self._built:
            if module.training is not trains:
                module.training = trains

    def _now(self) -> list[bool]:
        return [module.training for _, module, _ in self._built]
