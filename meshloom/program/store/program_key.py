"""What decides which program a batch needs: the function, the mode, and what the batch is like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshloom.core.job import LossFunction
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program

# Of a batch's tensors: name, shape and dtype; and what else the batch holds that a program is for, by name.
Shapes = tuple[tuple[str, tuple[int, ...], str] | tuple[str, str | None], ...]


@dataclass(frozen=True)
class ProgramKey:
    """The program of a loss or metric, for training or evaluation, for batches of these shapes.

    >>> import torch
    >>> ProgramKey.of_tensors(len, {"x": torch.ones(2, 3)}, training=True).shapes
    (('x', (2, 3), 'torch.float32'),)
    """

    function: LossFunction
    training: bool
    shapes: Shapes

    @staticmethod
    def of_tensors(function: LossFunction, batch: Any, *, training: bool) -> ProgramKey:
        """For a batch's tensors, whatever else it holds."""
        return ProgramKey(function, training, shapes_of(leaves_of(batch)))

    @staticmethod
    def of_program(function: LossFunction, program: Program) -> ProgramKey:
        """For the batches that a program is for."""
        tensors = tuple(
            (each.name, each.meta.shape, str(each.meta.dtype))
            for each in program.inputs
            if each.name not in program.others
        )
        return ProgramKey(function, program.training, (*tensors, *program.others.items()))

    def tensors_only(self, others: int) -> ProgramKey:
        """The same without the last `others`, which are no tensors."""
        return replace(self, shapes=self.shapes[: len(self.shapes) - others])


def shapes_of(leaves: Leaves) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Of the tensors of a batch."""
    return tuple((name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves.tensors.items())
