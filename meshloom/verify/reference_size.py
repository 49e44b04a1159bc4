"""Whether one device can hold what a plan is compared with; where it cannot, the sentence that says so."""

from __future__ import annotations

import torch
from torch import nn

from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.core.units import format_bytes
from meshloom.data.to_device import lifted
from meshloom.machine.host_memory import free_bytes
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.planner.fitting import state_bytes
from meshloom.verify.fewer_blocks import find_blocks


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
