"""Where the values of parameters and buffers come from before the first step: each rank fills what it holds,
one tensor at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshloom.comm import pieces as moves
from meshloom.comm.pieces import Pieces
from meshloom.core.errors import JobError
from meshloom.core.random import derive
from meshloom.parameters.values.building import READS
from meshloom.parameters.values.conventions import values_by_convention


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldTensor:
    """What a rank holds of one parameter or buffer.

    name: the first of its names in the model. tensor: memory to be filled, of the shape of this rank's piece, or flat; a parameter
        may move to other memory before it is. pieces: which rank along tp holds what of it; None: this one holds all.
        rank: this one along tp. span: start and stop of the elements that are held of the flattened piece;
        None: all.
    """

    name: str
    tensor: Tensor
    pieces: Pieces | None = None
    rank: int = 0
    span: tuple[int, int] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """What is held of the full tensor."""
        piece = whole if self.pieces is None else moves.take(self.pieces, self.rank, whole)
        return piece if self.span is None else piece.reshape(-1)[slice(*self.span)]

    def take(self, whole: Tensor) -> None:
        """Copy what is held of the full tensor."""
        with torch.no_grad():
            self.tensor.copy_(self.of(whole))


class InitialValues(ABC):
    """The values of a model's parameters and buffers at the start."""

    @abstractmethod
    def fill(self, held: Sequence[HeldTensor]) -> None:
        """Sets the values of all `held`."""

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether they may need the whole model, so that the ranks of a host fill one after another."""


class FromCheckpoint(InitialValues):
    """No values for the tensors called `names`, which a checkpoint gives before the first step; of the others, which it does
    not have, those of `others`."""

    def __init__(self, names: Container[str], others: InitialValues) -> None:
        self._names, self._others = names, others

    def fill(self, held: Sequence[HeldTensor]) -> None:
        self._others.fill([each for each in held if each.name not in self._names])

    @property
    def is_built(self) -> bool:
        return self._others.is_built


class FromConventions(InitialValues):
    """Values of each module's convention, from a seed that follows from the job's and the module's name.

    model: with parameters on the meta device. had: of parameters that were built with values. lacking: buffers that were
        built without.
    """

    def __init__(
        self, model: nn.Module, seed: int, had: Mapping[str, Tensor], lacking: Collection[str]
    ) -> None:
        self._model, self._seed, self._had, self._lacking = model, seed, had, lacking
        self._names = dict(model.named_parameters()).keys()  # buffers are as they were built

    def fill(self, held: Sequence[HeldTensor]) -> None:
        by_module: dict[str, list[HeldTensor]] = {}
        for each in held:
            name = each.name
            if name in self._lacking:
                raise JobError(
                    f'Job(init="keyed") makes each tensor of the model by itself, and the buffer {name} is computed from values of parameters. Compute it in '
                    "the forward, or leave init out."
                )
            if name in self._had:
                each.take(self._had[name])
            elif name in self._names:
                by_module.setdefault(name.rpartition(".")[0], []).append(each)
        for path, of_module in by_module.items():
            values = self._of_module(path)
            for each in of_module:
                found = values[each.name.rpartition(".")[2]]
                if bool(found.isnan().any()):
                    raise self._without_convention(each.name, path)
                each.take(found)

    @property
    def is_built(self) -> bool:
        return False

    def _of_module(self, path: str) -> dict[str, Tensor]:
        try:
            return values_by_convention(self._model, path, derive(self._seed, "init", path))
        except READS as error:
            kind = type(self._model.get_submodule(path)).__name__
            raise JobError(
                f'Job(init="keyed") makes the values of each module by itself, and those of {path or "the model"} ({kind}) cannot be made without other modules: '
                f'{error}. Use init="stream", or Job(weights=...).'
            ) from error

    def _without_convention(self, name: str, path: str) -> JobError:
        kind = type(self._model.get_submodule(path)).__name__
        return JobError(
            f'Job(init="keyed") makes each tensor of the model by itself, and {name} of {kind} has no convention: no reset_parameters there gives it values, and no '
            '_init_weights of a module around it. Write one, or use init="stream" or Job(weights=...).'
        )
