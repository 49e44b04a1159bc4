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
from meshloom.core.plan import DEFAULTS
from meshloom.exchange.buckets.gradient_bytes import gradient_bytes
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.planner.memory.fake_step import FakeStep
from meshloom.planner.memory.rank_memory import window_bytes
from meshloom.planner.memory.unit_bytes import unit_bytes
from meshloom.program.ir.program import Program

PHASES = ("forward", "backward", "update", "publish")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device in a training step that is not the first: the optimizer has its state.

    parameters, buffers: of the model.
    gradients: of all parameters when backward is done, with buckets for their exchange.
    optimizer: its state. batch: the tensors of the step's chunks that lie on the device.
    kept: what a chunk's forward leaves behind: activations for its backward.
    copied: of the state, for a checkpoint that is written in the background. offloaded: of the optimizer's state,
        elsewhere; what an update needs of it at one time is part of the peak.
    guessed: optimizers that are not on the lists of `optimizer/reach.py`, whose state is guessed.
    temporaries: everything else at the peak, including the program's constants.
    peaks: phase -> most bytes at one time in it. publish: sending updated parameters, where each rank updates
        a part.
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
    offloaded: int = 0
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
    dp: int = 1,
    zero: int = 0,
    bucket_bytes: int = DEFAULTS["bucket_bytes"],
    one_copy: bool = False,
    copies: bool = False,
    offload: bool = False,
) -> Memory:
    """Memory of a step of `program`, which is that of one chunk, on each of `dp` devices.

    optimizer: the job's function, given parameters without values. microbatches: chunks per device and step.
    zero: 1 divides the optimizer's state over the devices, which is exact for optimizers that update each
    element by itself; 2 also the gradients, but for those on their way; 3 parameters, too, of which a few
    units are full at a time (`unit_bytes`). Of the exchange, the flat buckets of gradients and parameters are
    counted (without their padding), not what the transport itself needs. bucket_bytes: as of a plan.
    one_copy: the devices are ranks of one host that have the parameters and the optimizer's state once; each
    is counted its share of them. copies: whether a device's part of the state is copied beside it, for checkpoints
    in the background; counted where the device is the host. offload: whether the optimizer's state is elsewhere.
    """
    if microbatches < 1 or dp < 1 or zero not in (0, 1, 2, 3):
        raise PlanError(
            f"Memory is predicted for microbatches >= 1, dp >= 1 and zero 0 to 3, not microbatches={microbatches}, dp={dp}, zero={zero}."
        )
    # from the second on they are all equal
    step = FakeStep(program, optimizer, microbatches=min(microbatches, 2), bucketed=dp > 1)
    divided = dp if zero or one_copy else 1
    buckets = gradient_bytes(
        step.trainable_bytes, dp=dp, zero=zero, bucket_bytes=bucket_bytes, one_copy=one_copy
    )
    parameters = -(-step.parameter_bytes // dp) if one_copy else step.parameter_bytes
    if zero == 3 and dp > 1 and not one_copy:
        units = unit_bytes({name: each.meta for name, each in program.parameters.items()}, bucket_bytes)
        buckets, parameters = units.held_gradients(dp), units.held_parameters(dp)
    state, offloaded = -(-step.optimizer_bytes // divided), 0
    if offload:
        state, offloaded = 0, state
    # other devices get one chunk at a time
    held = program.inputs if program.device.type != "cpu" else program.inputs * microbatches
    batch = sum(_num_bytes(each.meta) for each in held)
    copied = 0
    if copies and not offload and program.device.type == "cpu":
        copied = copied_bytes(step.parameter_bytes + step.optimizer_bytes, step.buffer_bytes, dp)
    standing = parameters + step.buffer_bytes + step.constant_bytes + state + batch + buckets + copied
    peaks = {phase: standing + num_bytes for phase, num_bytes in step.peaks.items()}
    largest = max((each.meta.num_bytes for each in program.parameters.values()), default=0)
    if "update" in peaks:
        peaks["update"] += window_bytes(
            offloaded, largest, step.optimizer_bytes / max(step.parameter_bytes, 1)
        )
        peaks["update"] -= step.master_gradients - -(-step.master_gradients // divided)  # of what it owns
    if divided > 1 and not one_copy and zero != 3:
        peaks["publish"] = standing + -(-step.parameter_bytes // dp)  # each rank's part is copied to be sent
    phase = max(peaks, key=lambda each: peaks[each])
    return Memory(
        parameters=parameters,
        gradients=step.gradient_bytes + buckets,
        optimizer=state,
        buffers=step.buffer_bytes,
        batch=batch,
        kept=step.kept_bytes,
        temporaries=step.temporaries.get(phase, peaks[phase] - standing) + step.constant_bytes,
        peaks=peaks,
        copied=copied,
        offloaded=offloaded,
        guessed=tuple(step.guessed),
    )


def copied_bytes(divided: int, buffers: int, dp: int) -> int:
    """Bytes of its state that a rank copies for a checkpoint in the background: of parameters and optimizer state,
    which its `dp` replicas divide, and of buffers, which one of them has."""
    return -(-divided // dp) + buffers


def _num_bytes(meta: Any) -> int:
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride or not size else 1
    return count * meta.dtype.itemsize
