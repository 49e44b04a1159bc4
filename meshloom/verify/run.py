"""Runs a job under a plan and on one device, step by step, and compares the two.

The plan runs in the ordinary trainer, by the steps that `meshloom train` takes; an observer in each replica records what
its chunks received and computed. Rank 0 collects the records, runs the same step on one device and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from meshloom.core.errors import JobError, PlanError
from meshloom.core.job import Job
from meshloom.core.moments.numerics import numeric_settings
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS, Precision
from meshloom.launch.environment import launched_rank
from meshloom.launch.failure import own_line
from meshloom.launch.one_at_a_time import working_alone
from meshloom.machine.process_memory import collected_once
from meshloom.replica.step_checks import SharedWriteError
from meshloom.telemetry.timings import Timings
from meshloom.verify.compared.compare import Comparer
from meshloom.verify.comparison_run import compare_here
from meshloom.verify.findings import Report
from meshloom.verify.reference_size import check_reference_fits
from meshloom.verify.tolerances.of_precision import rounds_partial_sums
from meshloom.verify.verified_run import Compare, VerifiedRun

# what torch's own errors of dtypes call them
_PRECISIONS_IN_ERRORS = {torch.float64: "double", torch.float32: "float"}


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
        check_reference_fits(job, dtype, on_gpu=on_gpu)
    # Replicas that share a chunk draw for the rows of each, which one device can do only where every draw has a key.
    keyed = plan.sync_batch_norm and plan.dp > 1 and not plan.keyed_draws
    run = VerifiedRun(
        job=job, plan=replace(plan, keyed_draws=True) if keyed else plan, shares=_varying_shares(plan, steps), dtype=dtype,
        settings={
            "devices": devices, "timeout_seconds": timeout_seconds, "transport": transport, "oversubscribe": oversubscribe, "overcommit": overcommit,
            "cache": cache, "timings": timings
        },
        compare=compare
    )  # fmt: skip
    take = partial(VerifiedRun.quick, steps=steps)
    if not quick:
        take = partial(VerifiedRun.whole, steps=max(steps, 3 if job.average is None else 4))
    with working_alone(), collected_once(), _explained(dtype):
        try:
            take(run)
        except SharedWriteError:
            run = replace(run, share=False, comparison=None)
        if not run.share:
            take(run)
    return _report(run, plan, keyed=keyed) if run.result else None


def _report(run: VerifiedRun, plan: Plan, *, keyed: bool) -> Report:
    """What came of a run."""
    result = run.result
    assert result is not None
    of_draws = (
        "draws are keyed, one by one, on both sides: replicas that share chunks draw for the rows of each"
    )
    return Report(
        plan=str(plan), devices=run.devices, precision=_name_of(result.comparer.precision), owned=run.owned,
        steps=result.steps, explained=result.explained, operator=run.operator, moment=run.moment, casts=result.comparer.casts,
        whole=result.whole, autocast=_of_precision(run.plan, result.comparer, run.dtype),
        settings=numeric_settings(), differing=result.differing, digest=run.digest,
        notes=[*run.notes, *([of_draws] if keyed else []), *([_of_digest(run)] if run.digest else [])], between=run.between
    )  # fmt: skip


def _of_digest(run: VerifiedRun) -> str:
    own = "as `meshloom train` prints it for this job and plan"
    other = "and training in the job's own precision may have another"
    return f"what ran has digest {run.digest}, {own if run.dtype is None else other}"


def _name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _of_precision(plan: Plan, comparer: Comparer, dtype: torch.dtype | None) -> str:
    if dtype == torch.float64 and PRECISIONS[plan.precision] != Precision():
        why = "autocast casts nothing in float64" if comparer.autocast else "both sides are in float64"
        return f"precision={plan.precision} is left out on both sides, as {why}"
    rounded = comparer.autocast or comparer.lowered
    if rounded is None:
        return ""
    name = _name_of(rounded)
    if comparer.autocast:
        what = f"losses are computed under autocast to {name}, on one device too"
        if PRECISIONS[plan.precision].scaled:
            what += ", and scaled, by each with a scale of its own"
    else:
        what = f"parameters are {name}, each the rounding of a copy in {_name_of(comparer.precision)} that is updated and compared, on one device too"
    if not rounds_partial_sums(plan):
        return what
    if plan.compiles:
        return f"{what}; compiled operators round to it in other places, so gradients may differ as far as rounding moves one device's"
    setting = f"tp={plan.tp}" if plan.tp > 1 else "sync_batch_norm=true"
    return f"{what}; with {setting} partial sums are rounded to it, so gradients may differ as far as rounding moves one device's"


@contextmanager
def _explained(dtype: torch.dtype | None) -> Iterator[None]:
    """A context that raises `JobError` where a job has dtypes of its own, which `dtype` does not go with."""
    try:
        yield
    except Exception as error:
        said = " ".join(f"{type(each).__name__}: {each}" for each in (error, error.__cause__))
        is_torchs = "RuntimeError" in said or "NotImplementedError" in said
        if (
            dtype not in _PRECISIONS_IN_ERRORS
            or not is_torchs
            or _PRECISIONS_IN_ERRORS[dtype] not in said.lower()
        ):
            raise
        name, line = _name_of(dtype), own_line(error)
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


def _varying_shares(plan: Plan, steps: int) -> list[tuple[int, tuple[int, ...]]]:
    """For plans with measured shares: other shares in every step after the first, since any must be right."""
    if plan.shares != "measured":
        return []
    return [
        (step, tuple(1 + (replica + step) % plan.dp for replica in range(plan.dp)))
        for step in range(1, max(steps, 2))
    ]
