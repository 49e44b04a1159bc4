"""The key of the program that a batch needs: function, mode, and the shapes and values of the batch."""

from __future__ import annotations

from typing import NamedTuple

from meshloom.core.job import LossFunction
from meshloom.program.ir.program import Program

# Name, shape and dtype of each tensor of a batch; then name and text of other values that a program is for.
Shapes = tuple[tuple[str, tuple[int, ...], str] | tuple[str, str | None], ...]


class ProgramKey(NamedTuple):
    """The program of a loss or metric, for training or evaluation, for batches of these shapes."""

    function: LossFunction
    training: bool
    shapes: Shapes

    @staticmethod
    def of_program(function: LossFunction, program: Program) -> ProgramKey:
        """The key of the batches that a program is for."""
        tensors = ((each.name, each.meta.shape, str(each.meta.dtype)) for each in program.tensor_inputs)
        return ProgramKey(function, program.training, (*tensors, *program.others.items()))

    def tensors_only(self, others: int) -> ProgramKey:
        """The same key without the last `others` entries, which are not tensors."""
        return self._replace(shapes=self.shapes[: len(self.shapes) - others])
