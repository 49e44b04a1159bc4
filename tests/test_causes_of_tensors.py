"""Causes that show in the elements of gradients are told apart, and correct rounding is none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.causes.of_tensors import exchanged, from_mixture, from_places, from_rounding
from meshloom.verify.compared.compare_chunks import facts_of, first_module, first_output
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
