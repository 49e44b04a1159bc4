"""Waits that are left out of the product, one at a time: simulated ranks compute something else then, in every run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch

import meshloom.program.operators.collectives
import meshloom.replica.buffers.batch_norm
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.exchange.buckets.reduction import Exact
from meshloom.exchange.buckets.rounds import RoundsUnderWay
from meshloom.exchange.copies import OneEach
from meshloom.exchange.sharded import Sharded
from meshloom.exchange.units.unit_gathering import _Gather
from meshloom.parameters.pipeline_ownership import PipelineOwnership
from meshloom.pipeline.runtime.run import PipelineRun
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.team_sums import TeamSums
from meshloom.verify.run import verify
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


class _Unwaited(ast.NodeTransformer):
    """Removes the `number`-th `.wait()` of a function."""

    def __init__(self, number: int) -> None:
        self.left = number

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "wait" and not node.args:
            self.left -= 1
            return node.func.value if self.left == -1 else node
        return node


def leave_out_wait(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int = 0) -> None:
    """Replace `owner.name` by the same function without one of its waits."""
    given = inspect.getattr_static(owner, name)
    function = given.__func__ if isinstance(given, staticmethod) else given
    tree = ast.parse("from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(function)))
    removal = _Unwaited(number)
    tree = ast.fix_missing_locations(removal.visit(tree))
    assert removal.left < 0, "there is no such wait"
    found: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(function), "exec"), function.__globals__, found)  # noqa: S102
    patch.setattr(owner, name, staticmethod(found[name]) if isinstance(given, staticmethod) else found[name])


WAITS: dict[str, tuple[Any, str, int, str, str]] = {
    "buckets are summed": (Exact, "finish", 0, "gpt", "dp=2"),
    "a round of zero=2": (RoundsUnderWay, "_end_one", 0, "gpt", "dp=2,microbatches=2,zero=2"),
    "a slice of zero=1": (Sharded, "finish", 0, "gpt", "dp=3,zero=1"),
    "parameters of zero=1": (OneEach, "publish", 0, "gpt", "dp=2,zero=1"),
    "a unit of zero=3": (_Gather, "wait", 0, "gpt", "dp=2,zero=3"),
    "a stage's input or gradient": (PipelineRun, "run", 0, "gpt", "pp=2,microbatches=3"),
    "a tied gradient": (PipelineOwnership, "return_gradients", 0, "gpt", "pp=2,microbatches=2"),
    "a lent value": (PipelineOwnership, "lend", 0, "gpt", "pp=2,microbatches=2"),
    "a sum along tp": (meshloom.program.operators.collectives, "start_sum", 0, "gpt", "tp=2"),
    "a gathering along tp": (meshloom.program.operators.collectives, "start_gather", 0, "gpt", "tp=3"),
    "statistics": (
        meshloom.replica.buffers.batch_norm,
        "_joined_statistics",
        0,
        "cnn",
        "dp=2,sync_batch_norm=true",
    ),
    "the norm's parts": (TeamSums, "add_up", 0, "gpt", "pp=2,tp=2"),
    "losses": (LossSums, "wait", 0, "mlp", "dp=2"),
}
QUICK = {"buckets are summed", "a unit of zero=3", "a stage's input or gradient", "a sum along tp"}


@pytest.mark.covering("buckets", "a unit of zero=3", "a stage's")
@pytest.mark.parametrize(
    "wait", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in WAITS]
)
def test_a_wait_left_out_is_noticed_by_verify(wait: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, number, model, plan = WAITS[wait]
    leave_out_wait(monkeypatch, owner, name, number)
    assert _is_noticed(make_job(model, "adamw", batch_size=13, clip_grad_norm=0.5), plan)


def _is_noticed(job: Job, plan: str) -> bool:
    try:
        report = verify(job, Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)
    except MeshloomError as error:
        return "step 0" in str(error)  # its loss is not finite, or has no weight
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
