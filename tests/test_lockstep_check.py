"""Mistakes planted in divided programs are found, and the operator is named; runs without a mistake are not
flagged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

import meshloom.program.operators.collectives
import meshloom.program.operators.gathered
import meshloom.tensor_parallel.layout.layout
from meshloom.core.plan import Plan
from meshloom.verify import lockstep_check
from meshloom.verify.findings import Report
from tests.jobs import make_job
from tests.verified import report_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]
COLLECTIVES: Any = meshloom.program.operators.collectives


def report_of(model: str = "mlp", plan: str = "tp=2,tp_placements=first:column+second:row") -> Report:
    return report_on(make_job(model, "sgd"), plan, steps=1)


@pytest.mark.slow
def test_without_a_mistake_nothing_is_said():
    report = report_of()
    assert report.passed and not report.operator


@pytest.mark.slow
def test_a_rule_that_forgets_a_sum_is_named(monkeypatch: pytest.MonkeyPatch):
    right = meshloom.tensor_parallel.layout.layout.factors_of

    def wrong(call: Any, rules: Any) -> Any:
        factors = right(call, rules)
        return (
            dataclasses.replace(factors, sums=frozenset(), unsharded=frozenset())
            if factors is not None and call.name == "linear"
            else factors
        )

    monkeypatch.setattr(meshloom.tensor_parallel.layout.layout, "factors_of", wrong)
    report = report_of("mlp", "tp=2,tp_placements=first:column")
    assert not report.passed
    assert "linear of" in report.operator and "jobs.py" in report.operator


@pytest.mark.slow
def test_an_exchange_that_is_wrong_is_found_at_the_first_operator_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
):
    right = COLLECTIVES._value

    def wrong(change: Any, group: Any, value: Tensor) -> Tensor:
        found = right(change, group, value)
        return found if change.source == "invariant" else 1.5 * found

    monkeypatch.setattr(meshloom.program.operators.collectives, "_value", wrong)
    report = report_of("gpt", "tp=2")
    assert not report.passed
    assert "the first operator whose shards differ" in report.operator


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_found_backward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        meshloom.program.operators.gathered,
        "start_sum_back",
        lambda change, group, value, *, ours=False: lambda: value,
    )
    report = report_of("gpt", "tp=2")
    assert not report.passed
    assert "backward, the first gradient that differs" in report.operator


class Halved(nn.Module):
    """[batch, 7] -> [batch, 5]; of a split one piece is not used, whose gradient is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 12), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        used, _ = torch.tanh(self.first(x)).split([6, 6], dim=1)
        return self.head(used)


@pytest.mark.slow
def test_a_piece_of_a_split_that_nothing_uses_has_no_gradient(monkeypatch: pytest.MonkeyPatch):
    """The story: of a chunk on which the plan and one device differed, the search for the operator ended in an error of torch's hooks."""
    right = COLLECTIVES._value
    monkeypatch.setattr(COLLECTIVES, "_value", lambda *given: 1.5 * right(*given))
    job = dataclasses.replace(make_job("mlp", "sgd"), model=Halved)
    plan = Plan.parse("tp=2,tp_placements=head:row")
    report = report_on(job, plan, steps=1)
    assert not report.passed and report.operator


@pytest.mark.slow
def test_no_values_are_kept_to_be_compared(monkeypatch: pytest.MonkeyPatch):
    """The story: one device's values, all ranks' and the gradients of both were kept until they had been
    compared, 9.9 GB for a model of 60 million parameters."""
    right, note = COLLECTIVES._value, lockstep_check._InnerProducts.note
    of_one: list[tuple[int, StorageWeakRef]] = []
    left: list[float] = []

    def watched(self: Any, rank: int | None, node: Any, value: Any) -> None:
        if rank is None:
            of_one.extend(
                (each.nbytes, StorageWeakRef(each.untyped_storage()))
                for each in tree_leaves(value)
                if isinstance(each, Tensor)
            )
        else:
            there = sum(size for size, memory in of_one if not memory.expired())
            left.append(there / sum(size for size, _ in of_one))
        note(self, rank, node, value)

    monkeypatch.setattr(lockstep_check._InnerProducts, "note", watched)
    monkeypatch.setattr(
        COLLECTIVES,
        "_value",
        lambda change, group, value: (
            right(change, group, value) * (1.0 if change.source == "invariant" else 1.5)
        ),
    )
    report = report_of("gpt", "tp=2")
    assert not report.passed and of_one
    assert max(left) < 0.1  # views of parameters, which are there in any case
