"""What an optimizer's set-up sees of a model: the parameters of the model and of its parts, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshloom.core.job import NamedParameters


class ParametersOf:
    """The named parameters that a job's optimizer function is given, to be asked for as a module is.

    >>> import torch
    >>> named = list(torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)}).named_parameters())
    >>> [name for name, _ in ParametersOf(named).b.named_parameters()], len(list(ParametersOf(named).parameters()))
    (['weight', 'bias'], 4)
    """

    def __init__(self, named: NamedParameters) -> None:
        self._named = named

    def parameters(self) -> Iterator[Any]:
        """The trainable ones."""
        return (parameter for _, parameter in self._named)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """The trainable ones, with their names."""
        return iter(self._named)

    def __getattr__(self, name: str) -> Any:
        inner = [
            (key.partition(".")[2], value) for key, value in self._named if key.partition(".")[0] == name
        ]
        if not inner:
            raise AttributeError(f"the model has no trainable parameters under {name!r}")
        return inner[0][1] if inner[0][0] == "" else ParametersOf(inner)

    def __getitem__(self, index: int) -> Any:
        return getattr(self, str(index))
