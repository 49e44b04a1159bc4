"""Whether one device can hold what a plan is compared with; where it cannot, the sentence that says so."""

from __future__ import annotations

import torch
from torch import nn

from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.core.random import preserved_draws
from meshloom.core.units import format_bytes
from meshloom.machine.host_memory import free_bytes
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.parameters.model import build_model, describe_model
from meshloom.parameters.values.building import NotDescribableError
from meshloom.planner.fitting import state_bytes


def check_reference_fits(job: Job, dtype: torch.dtype | None, *, on_gpu: bool = False) -> None:
    """Raises `DeviceError` if one device cannot hold the whole model.

    dtype: the precision to run in instead of the job's own. on_gpu: whether the device is this process's GPU, not the host.
    """
    with preserved_draws():
        try:
            model = describe_model(job, dtype)
        except NotDescribableError:
            model = build_model(job, torch.device("cpu"), dtype)
    needed = reference_bytes(job, model)
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_bytes()
    if needed > free:
        raise DeviceError(
            f"One device needs at least {format_bytes(needed)} to run what the plan is compared with (parameters before and after an update, gradients, "
            f"optimizer state), and {format_bytes(free)} are free here. Verify the same job with fewer layers, or where there is more memory."
        )


def reference_bytes(job: Job, model: nn.Module) -> int:
    """Bytes that the reference holds of `model`, of which only shapes are read, at an update, without activations: its parameters
    twice, gradients, buffers and optimizer state."""
    named = [*model.named_parameters()]
    trained = sum(each.nbytes for _, each in named if each.requires_grad)
    held = 2 * sum(each.nbytes for _, each in named) + trained
    held += sum(each.nbytes for each in model.buffers() if each.layout == torch.strided)
    state = state_bytes(job, named)
    return held + (int(OPTIMIZER_FACTOR * trained) if state is None else state.total)
