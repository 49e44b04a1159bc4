"""Causes that show in the elements of gradients are told apart, and correct rounding is none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.causes.of_forwards import from_backward, from_forward
from meshloom.verify.causes.of_tensors import exchanged, from_mixture, from_places, from_rounding
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.compared.compare_chunks import (
    OutputSteps,
    facts_of,
    first_module,
    first_output,
    output_differs,
)
from meshloom.verify.diagnose import diagnose
from meshloom.verify.reference.mistakes import ChunkGradients, Evidence
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput, StepRecord


def gradients(*names: str, elements: int = 400) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(elements, dtype=torch.float64, generator=generator) for name in names}


def test_tensors_that_are_exchanged_are_named_with_those_that_they_are():
    right = gradients("a", "b", "c")
    actual = {"a": right["b"], "b": right["a"]}
    assert exchanged(actual, {name: right[name] for name in actual}, right) == {"a": "b", "b": "a"}
    assert not exchanged({"a": 2 * right["a"]}, {"a": right["a"]}, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_on_the_way_names_the_precision(dtype: torch.dtype):
    right = gradients("a")
    cause = from_rounding({"a": right["a"].to(dtype).double()}, right)
    assert (
        cause
        and cause.kind == "rounding"
        and f"rounding to {str(dtype).removeprefix('torch.')}" in cause.sentence
    )
    assert from_rounding({"a": 1.001 * right["a"]}, right) is None  # a factor has a direction
    assert from_rounding({"a": right["a"] + 0.1}, right) is None


def test_a_part_that_is_lost_is_told_by_its_place():
    right = gradients("a")
    cut = right["a"].clone()
    cut[380:] = 0
    cause = from_places({"a": cut}, right)
    assert cause and "the part from 95% to 100% of a differs and are zero" in cause.sentence
    assert from_places({"a": 2 * right["a"]}, right) is None
    assert from_places(right, right) is None


def test_a_chunk_that_is_used_twice_is_no_unknown_mixture():
    one, two = gradients("a"), {"a": gradients("b", "c")["c"]}
    chunks = [
        ChunkGradients(chunks=[0], weight=1.0, gradients=one),
        ChunkGradients(chunks=[1], weight=1.0, gradients=two),
    ]
    evidence = Evidence(plan=Plan(microbatches=2), norms={}, chunks=chunks, tied={})
    (cause,) = from_mixture({"a": one["a"]}, 1.0, evidence)
    assert cause.kind == "microbatches" and "chunk 0 2 times, chunk 1 0 times" in cause.sentence
    (cause,) = from_mixture({"a": 0.3 * one["a"] + 0.9 * two["a"]}, 1.0, evidence)
    assert cause.kind == "unknown"
    assert from_mixture({"a": torch.zeros_like(one["a"])}, 1.0, evidence) == []  # gradients that are lost


def record(*modules: str) -> StepRecord:
    outputs = tuple(ModuleOutput(name=name, call=0, total=1.0, square=1.0, count=1) for name in modules)
    chunk = ChunkRecord(index=0, samples=1, weight=1.0, loss_sum=1.0, data="", seed=0, modules=outputs)
    return StepRecord(step=0, loss=1.0, weight=1.0, gradient_norm=None, gradients={}, chunks=[chunk])


def wrong(name: str, kind: str) -> TensorError:
    return TensorError(name=name, kind=kind, step=0, error=1.0, tolerance=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "module"),
    [("gradient", "alpha"), ("update", "zeta"), ("buffer", "zeta")],  # backward begins at the end
)
def test_the_first_module_is_that_of_the_program_and_not_of_the_alphabet(kind: str, module: str):
    executed = record("zeta", "middle", "alpha", "")
    for ours in (executed, replace(executed, chunks=[])):  # observed or not, as in programs
        errors = [wrong("alpha.weight", kind), wrong("zeta.weight", kind), wrong("middle.weight", kind)]
        assert first_output(ours, executed, 1e-6, Plan()) is None
        assert first_module(executed, errors, Plan()) == module


def test_what_ranks_of_one_replica_hold_differently_is_not_said_of_replicas():
    ours = replace(record("a"), replicas=["x"], inconsistent=["a.weight differs between tp=0 and tp=1"])
    facts = [*facts_of(ours, record("a"), Plan(tp=2))]
    assert facts == ["After step 0, a.weight differs between tp=0 and tp=1."]


def compared(wrong_names: list[str], right_names: list[str], **fields: Any) -> Comparison:
    errors = [wrong(name, "gradient") for name in wrong_names]
    errors += [replace(wrong(name, "gradient"), error=0.0) for name in right_names]
    errors += [replace(wrong("loss", "loss"), error=0.0, tolerance=1e-6)]
    return Comparison(step=0, loss=(1.0, 1.0), errors=errors, facts=[], first_module=None, **fields)


def test_what_stages_send_back_is_wrong_where_gradients_are_right_from_a_module_on():
    executed, sizes = record("a", "b", "c", ""), dict.fromkeys(("a.weight", "b.weight", "c.weight"), 1.0)
    evidence = Evidence(plan=Plan(pp=2, microbatches=2), norms={}, tied={})
    cause = from_backward(compared(["a.weight", "b.weight"], ["c.weight"]), executed, evidence, sizes)
    assert (
        cause
        and cause.kind == "stages"
        and "of c and all behind it, but none of b and before" in cause.sentence
    )
    assert from_backward(compared(["a.weight", "c.weight"], ["b.weight"]), executed, evidence, sizes) is None
    one_bucket = replace(evidence, plan=Plan(dp=2))  # which may hold the same gradients
    assert (
        from_backward(compared(["a.weight", "b.weight"], ["c.weight"]), executed, one_bucket, sizes) is None
    )
    statistics = replace(evidence, plan=Plan(dp=2, sync_batch_norm=True), batch_norms=frozenset({"c"}))
    cause = from_backward(compared(["a.weight", "b.weight"], ["c.weight"]), executed, statistics, sizes)
    assert cause and cause.kind == "batch statistics" and "the statistics of c" in cause.sentence


def test_a_forward_is_named_by_its_module_or_else_by_its_chunks():
    executed, evidence = record("a", "b"), Evidence(plan=Plan(pp=2), norms={}, tied={})
    cause = from_forward(compared([], [], first_output="b"), executed, executed, evidence)
    assert cause and cause.kind == "forward" and "The output of b is the first" in cause.sentence
    other = replace(executed, chunks=[replace(executed.chunks[0], loss_sum=1.1)])
    cause = from_forward(compared([], []), other, executed, evidence)
    assert cause and cause.kind == "stages" and "The losses of chunks 0 differ" in cause.sentence
    assert from_forward(compared([], []), executed, executed, evidence) is None


def test_an_output_differs_that_is_suddenly_much_farther_off_or_in_another_order():
    def of(total: float, ramp: float = 0.0) -> ModuleOutput:
        return ModuleOutput(name="a", call=0, total=total, square=1.0, count=1, ramp=ramp)

    outputs = OutputSteps(tolerance=1e-4)
    assert [outputs.differs(of(1 + off), of(1.0)) for off in (1e-7, 1e-6, 5e-5)] == [False, False, True]
    assert output_differs(of(1.0, ramp=0.5), of(1.0, ramp=-0.5), 1e-4)
    assert not output_differs(replace(of(1.0), ramp=None), of(1.0, ramp=-0.5), 1e-4)


def test_noise_of_no_precision_is_said_to_be_of_as_many_bits():
    right, noise = gradients("a"), gradients("b", "c")["c"]
    cause = from_rounding({"a": right["a"] * (1 + 2e-5 * noise)}, right)
    assert cause and cause.kind == "rounding" and "about 15 bits" in cause.sentence
    assert from_rounding({"a": right["a"] * (1 + 0.1 * noise)}, right) is None


def updated(step: int, error: float, tolerance: float) -> Comparison:
    update = replace(wrong("a.weight", "update"), step=step, error=error, tolerance=tolerance)
    update = update if update.passed else replace(update, multiple=(1.0, error), elements=1000)
    return Comparison(step=step, loss=(1.0, 1.0), errors=[update], facts=[], first_module=None)


@pytest.mark.parametrize(("before", "kind"), [(3e-5, "rounding"), (1e-7, "optimizer")])
def test_updates_are_not_called_rounded_where_those_before_were_not(before: float, kind: str):
    executed, evidence = record("a"), Evidence(plan=Plan(dp=2), norms={}, tied={})
    both = replace(executed, gradients={"a.weight": torch.ones(3)})
    causes = diagnose(updated(1, 6e-5, 4e-5), both, both, evidence, [updated(0, before, 4e-5)])
    assert [each.kind for each in causes] == [kind]


@pytest.mark.parametrize(
    ("times", "elements", "kind"),
    [(1.002, 9, "rounding"), (1.002, 100_000, "optimizer")],  # by chance, or a direction
)
def test_updates_of_few_elements_are_a_multiple_by_chance(times: float, elements: int, kind: str):
    executed, evidence = record("a"), Evidence(plan=Plan(dp=2), norms={}, tied={})
    both = replace(executed, gradients={"a.weight": torch.ones(3), "a.bias": torch.ones(3)})
    many = updated(0, 1.6e-3, 1e-4)
    few = replace(many.errors[0], name="a.bias", multiple=(times, 5e-4), elements=elements)
    comparison = replace(many, errors=[*many.errors, few])
    assert [each.kind for each in diagnose(comparison, both, both, evidence)] == [kind]


@pytest.mark.parametrize(
    ("ours", "right", "shown"), [(True, False, "True"), ("mean", "sum", "mean"), (0.2, 0.1, "0.2")]
)
def test_settings_that_are_no_numbers_are_compared_as_well(ours: Any, right: Any, shown: str):
    what = "how of group 0 of optimizer 0"
    here, there = (replace(record("a"), settings=[{what: each}]) for each in (ours, right))
    assert [*facts_of(here, there, Plan())] == [f"{what} is {shown} after step 0, and {right} on one device."]
    assert not [*facts_of(there, there, Plan())]
