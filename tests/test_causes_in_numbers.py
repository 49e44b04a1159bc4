"""Causes that numbers alone tell: what a norm lacks, what each gradient is divided by, what memory still holds, what elements an update leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, Rows, seed_everything
from meshloom.verify.between_steps.checks import DifferingTensor
from meshloom.verify.causes.of_factors import factors_of_each
from meshloom.verify.causes.of_gradients import from_gradients
from meshloom.verify.causes.of_norms import from_norm, parts_of_norm
from meshloom.verify.causes.of_reruns import of_leftovers
from meshloom.verify.causes.of_updates import KeptUpdate, other_update
from meshloom.verify.causes.other_runs import whole_evidence
from meshloom.verify.compared.compare_evaluation import LentParameters, wrong_loans
from meshloom.verify.reference.chunk_run import DrawsOfChunks
from meshloom.verify.reference.float64_blocks import other_rows
from meshloom.verify.reference.mistakes import ChunkGradients, Evidence, subsample_each
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import initial_evidence
from meshloom.verify.reference.step_records import StepRecord
from tests.jobs import make_job
from tests.test_causes_of_tensors import compared, wrong

NONE = Evidence(plan=Plan(), norms={}, tied={})


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


GRADIENTS = {
    "a.weight": drawn(33, 37),
    "a.bias": drawn(33, seed=1),
    "b.weight": drawn(7, 5, seed=2),
    "filter.w": drawn(9, seed=3, dtype=torch.complex64),
}


def of_norm(missing: float) -> str:
    whole = sum(float(each.abs().double().square().sum()) for each in GRADIENTS.values())
    right = StepRecord(
        step=0, loss=1.0, weight=1.0, gradient_norm=math.sqrt(whole), gradients=GRADIENTS, chunks=[]
    )
    ours = replace(right, gradient_norm=math.sqrt(whole - missing))
    comparison = replace(compared([], ["a.weight"]), errors=[wrong("gradient norm", "norm")])
    (cause,) = from_norm(comparison, ours, right, replace(NONE, parts=parts_of_norm(GRADIENTS)))
    return cause.sentence


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (GRADIENTS["b.weight"], "by the gradient of b.weight."),
        (GRADIENTS["filter.w"].imag, "by the imaginary parts of filter.w."),
        (GRADIENTS["a.weight"].reshape(-1)[1024:], "by the last 197 elements of a.weight, behind whole blocks of 1,024."),
        (torch.cat([GRADIENTS[f"a.{each}"].reshape(-1) for each in ("weight", "bias")]), "by all gradients of a."),
    ],
)  # fmt: skip
def test_the_part_that_a_norm_lacks_is_named(part: Tensor, says: str):
    missing = float(part.double().square().sum())
    assert of_norm(missing).endswith(says) and "Its square has less" in of_norm(missing)
    assert "Its square has more" in of_norm(-missing)


def test_a_norm_that_lacks_no_part_is_said_to_lack_one_without_its_name():
    assert of_norm(0.3 * float(GRADIENTS["b.weight"].square().sum())).endswith(
        "a part of the model is left out."
    )


def chunked(
    *gradients: Mapping[str, Tensor | None], weight: float = 2.0, plan: str = "dp=2,microbatches=2"
) -> Evidence:
    chunks = [
        ChunkGradients(chunks=[number], weight=weight, gradients=each)
        for number, each in enumerate(gradients)
    ]
    return replace(NONE, plan=Plan.parse(plan), chunks=chunks)


def test_gradients_that_are_divided_by_powers_of_the_weight_are_named():
    evidence = chunked({}, {}, weight=19.0, plan="dp=2")
    right = {name: drawn(40, seed=seed).double() for seed, name in enumerate("abc")}
    parts = torch.cat([right["c"][:15] / 38**2, right["c"][15:] / 38])
    found = factors_of_each({"a": right["a"] / 38, "b": right["b"] / 38**8, "c": parts}, right, evidence)
    assert (
        found
        and "powers of 38, the weight of the whole batch (a 38^-1, b 38^-8, c 38^-1 and 38^-2)" in found.what
    )
    assert torch.allclose(found.expected("c"), parts)
    assert factors_of_each({name: each / 38 for name, each in right.items()}, right, evidence) is None
    assert factors_of_each({"a": right["a"] / 38, "b": right["b"] * 0.3}, right, evidence) is None


def test_what_a_chunk_leaves_in_memory_for_one_that_has_no_gradient_is_named():
    own = [drawn(20, seed=seed).double() for seed in range(4)]
    evidence = chunked({"a": own[0]}, {"a": None}, {"a": own[2]}, {"a": own[3]})
    right = {"a": (own[0] + own[2] + own[3]) / 8}
    ((cause, expected),) = of_leftovers(evidence, right, "All gradients are")
    assert torch.allclose(expected("a"), right["a"] + own[0] / 8)
    assert "what chunk 0 adds to a counts 2 times" in cause.sentence and "such as chunk 1" in cause.sentence
    others = {**right, "b": right["a"]}
    assert not [*of_leftovers(evidence, others, "All gradients are")]  # chunks use b, or nobody does
    assert not [*of_leftovers(chunked(*[{"a": each} for each in own]), right, "All gradients are")]


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)
        self.first.weight.register_hook(lambda gradient: gradient * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def hooked(model: Any = Hooked) -> Job:
    generator = torch.Generator().manual_seed(0)
    return Job(
        model=model, loss=lambda model, batch: model(batch).square().mean(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        data=lambda: torch.randn(24, 5, generator=generator), batch_size=6, steps=4,
    )  # fmt: skip


def test_a_hook_that_is_lost_is_named():
    reference = Reference(hooked(), Plan.parse("dp=2"))
    reference.run()
    right = subsample_each(reference.gradients)
    ours = {
        name: each if each is None or name != "first.weight" else 4 * each for name, each in right.items()
    }
    comparison = compared(["first.weight"], [name for name in right if name != "first.weight"])
    evidence = whole_evidence(reference, initial_evidence(reference, {}), comparison.errors, ours, 1e-6)
    record = StepRecord(step=0, loss=1.0, weight=6.0, gradient_norm=None, gradients=ours, chunks=[])
    (cause,) = from_gradients(
        replace(comparison, errors=[*comparison.errors, replace(wrong("loss", "loss"), error=0.0, tolerance=1e-6)]), record, replace(record, gradients=right), evidence
    )  # fmt: skip
    assert "those of a forward whose parameters have no hooks" in cause.sentence
    reference.evaluate()
    found = subsample_each(reference.gradients)["first.weight"]  # the run without it has put it back
    expected = right["first.weight"]
    assert found is not None and expected is not None and torch.allclose(found, expected)


def updated(
    change: Any, optimizer: str = "adamw"
) -> tuple[DifferingTensor, Reference, KeptUpdate, StepRecord]:
    reference = Reference(make_job("mlp", optimizer), Plan.parse("dp=2"))
    reference.run()
    kept = KeptUpdate.of(reference, None)
    assert kept is not None
    result = reference.update()
    name = next(name for name, each in reference.parameters.items() if each.ndim == 2)
    right = reference.parameters[name].detach()
    plan = change(right.clone(), reference.before[name])
    return DifferingTensor(name=name, kind="update", step=0, plan=plan, one_device=right), reference, kept, result  # fmt: skip


def test_elements_that_an_update_leaves_are_named():
    def left(right: Tensor, before: Tensor) -> Tensor:
        right.view(-1)[[0, 7]] = before.view(-1)[[0, 7]]
        return right

    differing, reference, kept, result = updated(left, "sgd")
    assert kept.cause(differing, result) is None
    cause = other_update(differing, reference)
    assert (
        cause is not None and "leaves 2 elements of" in cause.sentence and "(number 0, 7)" in cause.sentence
    )


def test_elements_whose_gradients_do_not_come_to_the_optimizer_are_named():
    def decayed(right: Tensor, before: Tensor) -> Tensor:
        right.view(-1)[3] = before.view(-1)[3] * 0.9999
        return right

    differing, reference, kept, result = updated(decayed)
    change = 1 - kept.rates[0][0] * reference.turn.optimizers[0].param_groups[0]["weight_decay"]
    differing.plan.view(-1)[3] *= change / 0.9999
    cause = kept.cause(differing, result)
    assert (
        cause is not None
        and f"where 1 of the {differing.plan.numel()} elements of its gradient are zero" in cause.sentence
    )


def test_updates_of_elements_beside_them_are_named():
    def shifted(right: Tensor, before: Tensor) -> Tensor:
        step = 0.3 * (right - before).reshape(-1).roll(1)
        step[0] = 100 * step.abs().max()  # something else
        return before + step.view(before.shape)

    differing, reference, *_ = updated(shifted, "sgd")
    cause = other_update(differing, reference)
    assert cause is not None and "are 0.3 times those one place before them" in cause.sentence
    differing, reference, *_ = updated(lambda right, before: before + 0.3 * (right - before), "sgd")
    assert other_update(differing, reference) is None


def test_parameters_that_are_not_lent_are_named_by_what_they_are_instead():
    def rank(number: int, seen: str, before: str, dp: int = 0) -> LentParameters:
        return LentParameters(rank=number, alike=[dp, 0], holders={"emb.weight": (0, 1)}, seen={"emb.weight": seen}, before={"emb.weight": before})  # fmt: skip

    assert not [*wrong_loans([rank(0, "a", "p"), rank(1, "a", "p"), rank(0, "b", "p", 1)])]
    ((name, cause),) = wrong_loans([rank(0, "a", "p"), rank(1, "p", "p")])
    assert name == "emb.weight" and "it is as in steps, and its owner has its average" in cause.sentence
    ((_, cause),) = wrong_loans([rank(0, "a", "a"), rank(1, "p", "p")])
    assert cause.sentence.endswith("what its owner has is not lent.")


def test_rows_that_are_lost_are_told_from_rows_too_many():
    one, other = (
        torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), 2), (9, 2), check_invariants=True) for rows in ([1, 4], [1, 6, 8])
    )  # fmt: skip
    assert other_rows(one, other) == ([6, 8], [4]) and other_rows(one, other.to_dense()) == ([], [])


@pytest.mark.parametrize("sizes", [(5, 4), (1, 2)])
def test_chunks_of_one_forward_have_their_rows_of_each_draw(sizes: tuple[int, int]):
    def draw(count: int) -> None:
        nn.functional.dropout(torch.ones(count, 3), 0.5)
        torch.rand(2 * count, 3)
        torch.randn_like(torch.ones(count, 2))

    seed_everything(3)
    whole = DrawsOfChunks(sizes)
    with whole:
        draw(sum(sizes))
    for number, size in enumerate(sizes):
        seen: list[str] = []
        seed_everything(3)
        with KeyedDraws(Rows(sum(sizes[:number]), size, sum(sizes)), seen):
            draw(size)
        assert seen == whole.of_chunks[number]
