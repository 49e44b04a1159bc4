"""Waits that are left out of the product, one at a time: simulated ranks compute something else then, in every run."""

from __future__ import annotations

import sys

import pytest
import torch

from meshloom.comm.simulated import _SimulatedWork, simulated_groups
from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def leave_out_waits(patch: pytest.MonkeyPatch, name: str) -> None:
    """Works are not waited for where the function `name`, or one within it, asks for it."""
    wait = _SimulatedWork.wait

    def waited(work: _SimulatedWork) -> None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].startswith("meshloom.comm."):
            frame = frame.f_back  # works of works
        if frame.f_code.co_qualname.partition(".<locals>")[0] != name:
            wait(work)

    patch.setattr(_SimulatedWork, "wait", waited)


WAITS: dict[str, tuple[str, str, str]] = {
    "buckets are summed": ("Exact.finish", "gpt", "dp=2"),
    "a round of zero=2": ("RoundsUnderWay._end_one", "gpt", "dp=2,microbatches=2,zero=2"),
    "a slice of zero=1": ("Sharded.finish", "gpt", "dp=3,zero=1"),
    "parameters of zero=1": ("OneEach.publish", "gpt", "dp=2,zero=1"),
    "a unit of zero=3": ("_Gather.wait", "gpt", "dp=2,zero=3"),
    "a stage's input or gradient": ("PipelineRun._run", "gpt", "pp=2,microbatches=3"),
    "a tied gradient": ("PipelineOwnership.return_gradients", "gpt", "pp=2,microbatches=2"),
    "a lent value": ("PipelineOwnership.lend", "gpt", "pp=2,microbatches=2"),
    "a sum along tp": ("start_sum", "gpt", "tp=2"),
    "a gathering along tp": ("start_gather", "gpt", "tp=3"),
    "statistics": ("_joined_statistics", "cnn", "dp=2,sync_batch_norm=true"),
    "the norm's parts": ("TeamSums.add_up", "gpt", "pp=2,tp=2"),
    "losses": ("LossSums.wait", "mlp", "dp=2"),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.slow
@pytest.mark.every
def test_a_wait_left_out_is_noticed_by_verify(wait: str, monkeypatch: pytest.MonkeyPatch):
    name, model, plan = WAITS[wait]
    leave_out_waits(monkeypatch, name)
    assert _is_noticed(make_job(model, "adamw", batch_size=13, clip_grad_norm=0.5), plan)


def _is_noticed(job: Job, plan: str) -> bool:
    try:
        report = verify(
            job, Plan.parse(plan), devices="simulated", transport="gloo", steps=2, dtype=torch.float64
        )
    except MeshloomError as error:
        # a loss or what an update leaves is not finite, there is no weight, or values arrive while they are used
        return any(sign in str(error) for sign in ("step 0", "not finite", "was changed in a forward"))
    return report is not None and not report.passed


def test_an_output_that_a_later_operation_writes_as_well_is_noticed():
    """What is gathered ahead into the memory that computes: the later operation may be done before the first is waited for."""
    groups = simulated_groups(2)
    outputs = [torch.zeros(2) for _ in groups]
    first = [group.all_gather(out, torch.full((1,), 1.0)) for group, out in zip(groups, outputs, strict=True)]
    second = [
        group.all_gather(out, torch.full((1,), 2.0)) for group, out in zip(groups, outputs, strict=True)
    ]
    for work in first:
        work.wait()
    assert all(bool(out.isnan().all()) for out in outputs)
    for work in second:
        work.wait()
    assert all(out.tolist() == [2.0, 2.0] for out in outputs)
    # one after another they may
    for number in (3.0, 4.0):
        works = [
            group.all_gather(out, torch.full((1,), number))
            for group, out in zip(groups, outputs, strict=True)
        ]
        for work in works:
            work.wait()
        assert all(out.tolist() == [number, number] for out in outputs)
