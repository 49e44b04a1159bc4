"""A setting of torch that rounds float32 values where they are multiplied (TF32 on GPUs, bfloat16 on CPUs that have it): parts of
a divided sum are rounded apart, so verify measures what that does, as it does of casts. It said DIFFERS of right plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshloom.core.moments import numerics
from meshloom.core.moments.numerics import numeric_settings, rounded_products
from meshloom.core.plan import Plan
from meshloom.verify.findings import lines_of
from meshloom.verify.reference.reference import Reference
from tests.jobs import make_job
from tests.verified import equals_one_device

CPU = torch.device("cpu")


@pytest.fixture
def medium() -> Iterator[None]:
    """Float32 as bfloat16, where this CPU has such products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("rounds", "found"),
    [(lambda x: x, None), (lambda x: x.half().float(), torch.float16), (lambda x: x.bfloat16().float(), torch.bfloat16)],
)  # fmt: skip
def test_what_products_round_to_is_found(
    rounds: Any, found: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    """TF32 has the digits of float16."""
    multiply, convolve = torch.Tensor.matmul, functional.conv2d

    def low(function: Any) -> Any:
        def around(one: Tensor, other: Tensor) -> Tensor:
            given = (rounds(each) if each.dtype == torch.float32 else each for each in (one, other))
            return function(*given)

        return around

    monkeypatch.setattr(torch.Tensor, "matmul", low(multiply))
    monkeypatch.setattr(functional, "conv2d", low(convolve))
    measured: Any = vars(numerics)["_measured"]
    measured.cache_clear()
    try:
        assert rounded_products(CPU) == (found, found)
    finally:
        measured.cache_clear()


def test_settings_of_products_are_those_of_all_ranks(medium: None):
    assert numeric_settings()["float32 products"] == "medium"
    assert numeric_settings()["float32 products on CPUs"] == "bf16"


def test_what_products_round_to_is_noted_of_float32_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "meshloom.verify.reference.reference.rounded_products", lambda device: (torch.float16, torch.bfloat16)
    )
    single = Reference(make_job("mlp", "sgd"), Plan()).casts
    assert [(each.place, each.dtype) for each in single] == [("", "bfloat16"), ("", "float16")]
    assert all(each.in_products for each in single)
    assert Reference(make_job("mlp", "sgd"), Plan(), torch.float64).casts == ()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.slow
def test_plans_that_multiply_as_the_settings_say_are_equal(plan: str, medium: None):
    report = equals_one_device(make_job("gpt", "adamw", steps=40), plan, steps=3, dtype=None)
    said = [
        line
        for line in lines_of(report)
        if "float32 is multiplied as bfloat16, by a setting of torch" in line
    ]
    assert bool(said) == (rounded_products(CPU)[0] is not None)
