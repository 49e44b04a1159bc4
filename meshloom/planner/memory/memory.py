"""Memory of one training step on one device, by kind; predicted from the program alone, before anything runs.

    parameters, optimizer, buffers, batch    ________________________________________________   there all the time
    kept activations                          /‾‾‾‾‾‾‾‾\\
    gradients                                /          \\______/‾‾‾‾‾‾‾‾‾
                                             forward    backward    update

The step is run on fake tensors: same operators, same autograd, same optimizer, no memory. Every allocation
is recorded with the moment at which it would be freed, so the peak is that of the real step, except for what
operators allocate internally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshloom.core.errors import PlanError
from meshloom.core.job import NamedParameters
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.planner.memory.fake_step import FakeStep
from meshloom.program.ir.program import Program


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device in a training step that is not the first: the optimizer has its state.

    parameters, buffers: of the model.
    gradients: of all parameters when backward is done.
    optimizer: its state. batch: the tensors of the step's chunks that lie on the device.
    kept: what a chunk's forward leaves behind: activations for its backward.
    copied: of the state, for a checkpoint that is written in the background.
    guessed: optimizers that are not on the lists of `optimizer/reach.py`, whose state is guessed.
    temporaries: everything else at the peak, including the program's constants.
    peaks: phase -> most bytes at one time in it.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    batch: int
    kept: int
    temporaries: int
    peaks: Mapping[str, int]
    copied: int = 0
    guessed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "peaks", MappingProxyType(dict(self.peaks)))

    @property
    def peak(self) -> int:
        """Most bytes at one time in the step."""
        return max(self.peaks.values())

    @property
    def phase(self) -> str:
        """In which that is."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def optimizer_factor(self) -> float:
        """Bytes of optimizer state per byte of parameters."""
        return self.optimizer / self.parameters if self.parameters else OPTIMIZER_FACTOR


def predict_memory(
    program: Program,
    optimizer: Callable[[NamedParameters], Any],
    *,
    microbatches: int = 1,
    copies: bool = False,
) -> Memory:
    """Memory of a step of `program`, which is that of one chunk, on one device.

    optimizer: the job's function, given parameters without values. microbatches: chunks of a step. copies: whether the state is
    copied beside it, for checkpoints in the background; counted where the device is the host.
    """
    if microbatches < 1:
        raise PlanError(f"Memory is predicted for microbatches >= 1, not microbatches={microbatches}.")
    # from the second on they are all equal
    step = FakeStep(program, optimizer, microbatches=min(microbatches, 2))
    # other devices get one chunk at a time
    held = program.inputs if program.device.type != "cpu" else program.inputs * microbatches
    batch = sum(_num_bytes(each.meta) for each in held)
    state = step.parameter_bytes + step.optimizer_bytes + step.buffer_bytes
    copied = state if copies and program.device.type == "cpu" else 0
    standing = state + step.constant_bytes + batch + copied
    peaks = {phase: standing + num_bytes for phase, num_bytes in step.peaks.items()}
    phase = max(peaks, key=lambda each: peaks[each])
    return Memory(
        parameters=step.parameter_bytes,
        gradients=step.gradient_bytes,
        optimizer=step.optimizer_bytes,
        buffers=step.buffer_bytes,
        batch=batch,
        kept=step.kept_bytes,
        temporaries=step.temporaries.get(phase, peaks[phase] - standing) + step.constant_bytes,
        peaks=peaks,
        copied=copied,
        guessed=tuple(step.guessed),
    )


def _num_bytes(meta: Any) -> int:
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride or not size else 1
    return count * meta.dtype.itemsize
