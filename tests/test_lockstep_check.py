"""Mistakes planted in divided programs are found, and the operator is named; runs without a mistake are not
flagged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import meshloom.program.operators.collectives
import meshloom.program.operators.gathered
import meshloom.tensor_parallel.layout.layout
from meshloom.comm.pieces import Pieces, place, take, whole
from meshloom.core.plan import Plan
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.linears import GatheredLinears
from meshloom.verify import lockstep_check
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]
COLLECTIVES: Any = meshloom.program.operators.collectives


def report_of(model: str = "mlp", plan: str = "tp=2,tp_placements=first:column+second:row") -> Report:
    report = verify(
        make_job(model, "sgd"), Plan.parse(plan), devices="simulated", steps=1, dtype=torch.float64
    )
    assert report is not None
    return report


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
def test_an_exchange_that_is_wrong_is_told_from_a_wrong_program(monkeypatch: pytest.MonkeyPatch):
    right = COLLECTIVES._value

    def wrong(change: Any, group: Any, value: Tensor) -> Tensor:
        found = right(change, group, value)
        return found if change.source == "invariant" else 1.5 * found

    monkeypatch.setattr(meshloom.program.operators.collectives, "_value", wrong)
    report = report_of("gpt", "tp=2")
    assert not report.passed
    assert "in what they send each other" in report.operator


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_found_backward(monkeypatch: pytest.MonkeyPatch):
    right = COLLECTIVES._gradients

    def wrong(change: Any, gradients: Any) -> list[Tensor]:
        if change.source != "invariant" or change.target != "part":
            return right(change, gradients)
        return [place(change.after, rank, each).clone() for rank, each in enumerate(gradients)]

    # The same mistake where all ranks run at once, and where each runs its own layers.
    monkeypatch.setattr(meshloom.program.operators.collectives, "_gradients", wrong)
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
    report = verify(job, plan, devices="simulated", steps=1, dtype=torch.float64)
    assert report and not report.passed and report.operator


def test_layers_that_share_an_input_have_their_own_backward_on_all_ranks(monkeypatch: pytest.MonkeyPatch):
    """The story: on all ranks torch's backward ran in place of theirs, so a mistake in it was not found."""
    halves = Pieces((4, 6), ((None, ((0, 3),)), (None, ((3, 6),))))
    layers = GatheredLinears(
        change=Transition(source="part", target="part", before=halves, after=whole((4, 6), 2)),
        biased=(True, False),
    )
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, ours = drawn(4, 6), [[drawn(3, 6), drawn(3), drawn(2, 6)] for _ in range(2)]

    def gradients() -> tuple[list[Tensor], list[Tensor]]:
        """Of ranks' x, and of all weights."""
        parts = [take(halves, rank, x).clone().requires_grad_() for rank in range(2)]
        weights = [[each.clone().requires_grad_() for each in of_rank] for of_rank in ours]
        results = layers.run_all(parts, *([of_rank[number] for of_rank in weights] for number in range(3)))
        sum(each.square().sum() for of_rank in results for each in of_rank).backward()  # type: ignore[union-attr]
        return [each.grad for each in parts], [each.grad for of_rank in weights for each in of_rank]  # type: ignore[misc]

    known, weights = (
        x.clone().requires_grad_(),
        [[each.clone().requires_grad_() for each in of] for of in ours],
    )
    for one, bias, other in weights:
        (
            functional.linear(known, one, bias).square().sum()
            + functional.linear(known, other).square().sum()
        ).backward()
    of_x, of_weights = gradients()
    torch.testing.assert_close(torch.cat(of_x, 1), known.grad)
    torch.testing.assert_close(of_weights, [each.grad for of_rank in weights for each in of_rank])
    right = GatheredLinears.input_gradient
    monkeypatch.setattr(
        GatheredLinears,
        "input_gradient",
        lambda self, given, *rest: right(self, [given[0], 0 * given[1]], *rest),
    )
    assert not torch.allclose(torch.cat(gradients()[0], 1), known.grad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_values_are_kept_to_be_compared(monkeypatch: pytest.MonkeyPatch):
    """The story: one device's values, all ranks' and the gradients of both were kept until they had been
    compared, 9.9 GB for a model of 60 million parameters."""
    right, note = COLLECTIVES._value, lockstep_check._InnerProducts.note
    of_one: list[tuple[int, StorageWeakRef]] = []
    left: list[float] = []

    def watched(self: Any, node: Any, results: Any) -> None:
        if len(results) == 1:
            of_one.extend(
                (each.nbytes, StorageWeakRef(each.untyped_storage()))
                for each in tree_leaves(results)
                if isinstance(each, Tensor)
            )
        else:
            there = sum(size for size, memory in of_one if not memory.expired())
            left.append(there / sum(size for size, _ in of_one))
        note(self, node, results)

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
