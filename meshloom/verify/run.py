"""Runs a job under a plan and on one device, step by step, and compares the two.

The plan runs in the ordinary trainer, by the steps that `meshloom train` takes; an observer in each replica records what
its chunks received and computed. Rank 0 collects the records, runs the same step on one device and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from meshloom.core.errors import DeviceError, JobError, PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.core.units import format_bytes
from meshloom.launch.environment import launched_rank
from meshloom.launch.failure import own_line
from meshloom.launch.one_at_a_time import working_alone
from meshloom.machine.host_memory import free_bytes
from meshloom.machine.process_memory import collected_once
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.parameters.model import build_model, describe_model
from meshloom.parameters.values.building import NotDescribableError
from meshloom.planner.fitting import state_bytes
from meshloom.replica.step_checks import SharedWriteError
from meshloom.telemetry.timings import Timings
from meshloom.verify.compared.compare import name_of
from meshloom.verify.comparison_run import compare_here
from meshloom.verify.findings import Report
from meshloom.verify.verified_run import Compare, VerifiedRun

# what torch's own errors of dtypes call them
_IN_ERRORS: dict[torch.dtype | None, str] = {torch.float64: "double", torch.float32: "float"}
_OF_DRAWS = "draws are keyed, one by one, on both sides: replicas that share chunks draw for the rows of each"


def verify(
    job: Job,
    plan: Plan,
    *,
    devices: str = "auto",
    steps: int = 3,
    dtype: torch.dtype | None = None,
    timeout_seconds: float = 600.0,
    transport: str = "auto",
    oversubscribe: bool = False,
    overcommit: bool = False,
    quick: bool = True,
    cache: str = "auto",
    timings: Timings | None = None,
    compare: Compare = compare_here,
) -> Report | None:
    """Run `steps` steps of `job` under `plan` and on one device, and compare. Returns None on ranks other
    than 0.

    dtype: run both in this precision; float64 tells a mistake from rounding. quick: the steps alone, without evaluation,
    checkpoint, resuming and the end of an epoch. cache, timings: as of a Trainer. overcommit: run although memory is predicted not to
    suffice. compare: where one device runs, beside rank 0: in its process, or in another. Raises as the trainer does, and `DeviceError` if one device cannot
    hold what the plan is compared with.
    """
    check_promised(plan)
    launched = launched_rank()
    if launched is None or launched.rank == 0:  # the one that runs the reference
        on_gpu = devices == "auto" and 0 < plan.mesh.size <= torch.cuda.device_count()
        on_gpu = on_gpu or devices.endswith("cuda")
        _check_reference_fits(job, dtype, on_gpu=on_gpu)
    # Replicas that share a chunk draw for the rows of each, which one device can do only where every draw has a key.
    keyed = plan.sync_batch_norm and plan.dp > 1 and not plan.keyed_draws
    run = VerifiedRun(
        job=job, plan=replace(plan, keyed_draws=True) if keyed else plan, shares=_varying_shares(plan, steps), dtype=dtype,
        settings={
            "devices": devices, "timeout_seconds": timeout_seconds, "transport": transport, "oversubscribe": oversubscribe, "overcommit": overcommit,
            "cache": cache, "timings": timings
        },
        compare=compare, notes=[_OF_DRAWS] if keyed else []
    )  # fmt: skip
    with working_alone(), collected_once(), _explained(dtype):
        try:
            run.take(steps, quick=quick)
        except SharedWriteError:
            run = replace(run, share=False, comparison=None)
        if not run.share:
            run.take(steps, quick=quick)
    return replace(run.report, plan=str(plan)) if run.report else None


@contextmanager
def _explained(dtype: torch.dtype | None) -> Iterator[None]:
    """A context that raises `JobError` where a job has dtypes of its own, which `dtype` does not go with."""
    try:
        yield
    except Exception as error:
        said = " ".join(f"{type(each).__name__}: {each}" for each in (error, error.__cause__))
        is_torchs, word = "RuntimeError" in said or "NotImplementedError" in said, _IN_ERRORS.get(dtype)
        names_others = word is not None and word in said.lower() and "inplace operation" not in said
        if not is_torchs or not names_others:
            raise
        name, line = name_of(dtype), own_line(error)
        raise JobError(
            f"In {name} this job cannot be computed{f' ({line})' if line else ''}: it has tensors of a dtype that it names itself, and {name} does not go with "
            f"them. Verify it in its own precision, without --dtype, or write x.to(weight.dtype) in place of what names one."
        ) from error


def check_promised(plan: Plan) -> None:
    """Raise `PlanError` naming the setting if the plan does not promise to equal one device."""
    if plan.exempt:
        raise PlanError(
            f"{plan.exempt}: such a plan does not promise to compute what one device computes, so there is nothing to verify. "
            "Verify it without that setting, and compare losses with it."
        )


def _check_reference_fits(job: Job, dtype: torch.dtype | None, *, on_gpu: bool = False) -> None:
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


def _varying_shares(plan: Plan, steps: int) -> list[tuple[int, tuple[int, ...]]]:
    """For plans with measured shares: other shares in every step after the first, since any must be right."""
    if plan.shares != "measured":
        return []
    return [
        (step, tuple(1 + (replica + step) % plan.dp for replica in range(plan.dp)))
        for step in range(1, max(steps, 2))
    ]
