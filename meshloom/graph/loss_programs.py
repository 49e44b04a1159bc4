"""The contract of what has the programs of a job's loss: one per loss function, mode and shape of batch, whole or this rank's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.graph.leaves import leaves_of
from meshloom.graph.pieces import Pieces
from meshloom.graph.program import Program
from meshloom.job import LossFunction

Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # of a batch's tensors, by name


class LossPrograms(ABC):
    """The programs of a job's loss, and of functions like it, as one rank of a replica runs them."""

    @abstractmethod
    def open(self, batch: Any, world: Group, model: nn.Module) -> Steps[Shapes]:
        """Read the loss of batches like `batch` and decide who holds what; their shapes. All ranks of `world` call it; batch and model count on its rank 0.

        model: the job's, whole, as it was built; it stays as it is.
        """

    @abstractmethod
    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Steps[None]:
        """Make sure that there are programs for batches like `batch`. All ranks of the replica call it with the same batch."""

    @abstractmethod
    def program(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        """This rank's part of the program for batches of these shapes, which are ready."""

    @abstractmethod
    def whole(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        """All of it."""

    @property
    @abstractmethod
    def pieces(self) -> Mapping[str, Pieces]:
        """Who holds what of every parameter and buffer along tp; what is not named is whole."""

    @property
    @abstractmethod
    def summed(self) -> tuple[str, ...]:
        """Parameters whose gradients are to be summed over tp, once a step."""


def shapes_of(batch: Any) -> Shapes:
    """What decides which program a batch needs.

    >>> shapes_of({"x": torch.ones(2, 3)})
    (('x', (2, 3), torch.float32),)
    """
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in leaves_of(batch).tensors.items())


def shapes_of_program(program: Program) -> Shapes:
    """The shapes of the batches that a program is for."""
    return tuple((each.name, each.meta.shape, each.meta.dtype) for each in program.inputs)


def alike(batch: Any) -> list[Any]:
    """The batch, and another of the same shapes: its samples one place on."""
    leaves = leaves_of(batch)
    return [batch, leaves.rebuild([leaf.roll(1, 0) if leaf.ndim else leaf for leaf in leaves.tensors.values()])]
