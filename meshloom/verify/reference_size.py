"""Whether one device can hold what a plan is compared with, and its host that beside the ranks; where it cannot, the sentence that says
so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import format_bytes, format_count
from meshloom.data.to_device import lifted
from meshloom.machine.host_memory import free_bytes
from meshloom.planner.fitting import predicted_ranks, state_bytes
from meshloom.planner.memory.rank_memory import RankMemory, held_by_one_device
from meshloom.planner.memory.step_facts import OPTIMIZER_FACTOR, StepFacts
from meshloom.planner.ranks import step_facts
from meshloom.planner.readings import Readings
from meshloom.replica.exchanges.sharing import shares_copies
from meshloom.verify.fewer_blocks import find_blocks

_SMALL = 16  # what all processes hold between steps at least is less than one of so many parts of what is free: they fit


def check_reference_fits(
    job: Job, model: nn.Module, dtype: torch.dtype | None, *, on_gpu: bool = False
) -> None:
    """Raises `DeviceError` if one device cannot hold the whole model, with the flag that verifies the same job
    with fewer blocks.

    model: the job's, of which only shapes are read. dtype: the precision to run in instead of the job's own.
    on_gpu: whether the device is this process's GPU, not the host.
    """
    needed = reference_bytes(job, model, dtype)
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_bytes()
    if needed <= free:
        return
    raise DeviceError(
        f"One device needs at least {format_bytes(needed)} to run what the plan is compared with (parameters before and after an update, gradients, "
        f"optimizer state), and {format_bytes(free)} are free here. {_way_out(model)}"
    )


def check_processes_fit(
    readings: Readings, model: nn.Module, plan: Plan, dtype: torch.dtype | None, *, num_here: int, quick: bool
) -> None:
    """Raises `DeviceError` if ranks on CPUs of this host, `num_here` of them, and the process of one device beside them are predicted to need
    more memory than is free. What is small, and what cannot be predicted, is let through."""
    job, free = readings.job, free_bytes()
    own = reference_bytes(job, model, None)
    if (num_here + 1) * own <= free // _SMALL:
        return
    wider = reference_bytes(job, model, dtype) / own
    try:
        needed = verification_bytes(readings, plan, num_here, wider, quick=quick)
        if needed.total <= free:
            return
        less = needed if quick else verification_bytes(readings, plan, num_here, wider, quick=True)
    except Exception:  # of the job's code, which the run itself will show
        return
    steps_alone = (
        f"--quick, the steps alone, is predicted to need {format_bytes(less.total)}. "
        if less.total <= free
        else ""
    )
    raise DeviceError(
        f"Verification is predicted to need {format_bytes(needed.total)} here at its peak: {format_count(num_here, 'rank')} up to "
        f"{format_bytes(needed.ranks)} together, the process of one device beside them up to {format_bytes(needed.one_device)}; {format_bytes(free)} are free. "
        f"{steps_alone}{_way_out(model)} --overcommit verifies it all the same."
    )


@dataclass(frozen=True, kw_only=True)
class VerificationBytes:
    """Predicted of the processes of one host: ranks, together, and one device at their peaks, and all at once: one device waits while
    ranks compute, and they while it does; who waits has returned what it has freed."""

    ranks: int
    one_device: int
    total: int


def verification_bytes(
    readings: Readings, plan: Plan, num_here: int, wider: float = 1.0, *, quick: bool
) -> VerificationBytes:
    """num_here: ranks of this host. wider: how many times the job's own tensors those of the verification are. Raises as
    `predicted_ranks`."""
    facts = step_facts(readings, plan)
    one_copy = quick and shares_copies(plan)  # else each replica has its own in the end
    memories = predicted_ranks(readings, plan, one_copy=one_copy)
    phases = ("step",) if quick else ("step", "evaluation", "checkpoint")
    computing = (
        sum(max(each.phases[phase] for phase in phases) for each in memories) * num_here // len(memories)
    )
    waiting = sum(map(_between_steps, memories)) * num_here // len(memories)
    device_waits = _of_one_device(readings.job, facts)
    device_computes = device_waits - facts.parameters + facts.chunks + facts.batch
    total = max(computing + device_waits, waiting + device_computes)
    return VerificationBytes(
        ranks=round(wider * computing), one_device=round(wider * max(device_waits, device_computes)), total=round(wider * total)
    )  # fmt: skip


def _between_steps(memory: RankMemory) -> int:
    kinds: Mapping[str, int] = memory.kinds()
    return sum(kinds[name] for name in ("parameters", "buffers", "optimizer", "gradients", "exchange"))


def _of_one_device(job: Job, facts: StepFacts) -> int:
    """As an update ends, with averages in float64."""
    return held_by_one_device(facts) + (facts.trained if job.average is not None else 0)


def _way_out(model: nn.Module) -> str:
    runs = find_blocks(model)
    largest = max(runs, key=lambda run: run.elements, default=None)
    if largest and largest.num_blocks > 2:
        return f"--blocks 2 verifies the same job with 2 of the {largest.num_blocks} repeated blocks in {largest.path or 'its model'}."
    return "Verify it where there is more memory, or with a smaller model."


def reference_bytes(job: Job, model: nn.Module, dtype: torch.dtype | None) -> int:
    """Bytes that the reference holds of `model` at an update, without activations: its parameters twice,
    gradients, buffers and optimizer state."""
    parameters = [(name, _shape_of(each, dtype)) for name, each in model.named_parameters()]
    trainable = [(name, each) for name, each in parameters if each.requires_grad]
    held = 2 * sum(each.nbytes for _, each in parameters) + sum(each.nbytes for _, each in trainable)
    held += sum(each.nbytes for each in model.buffers() if each.layout == torch.strided)
    return held + _optimizer_bytes(job, trainable)


def _optimizer_bytes(job: Job, trainable: list[tuple[str, nn.Parameter]]) -> int:
    """Of the state that the job's optimizers make."""
    found = state_bytes(job, trainable)
    return int(OPTIMIZER_FACTOR * sum(each.nbytes for _, each in trainable)) if found is None else found.total


def _shape_of(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    own = lifted(parameter.dtype, dtype)
    empty = torch.empty(parameter.shape, dtype=own, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
