"""What a sketch keeps of a tensor is its norm and its distance from others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError
from meshloom.program.capture.capture import capture_module
from meshloom.program.capture.check import check_against_module
from meshloom.program.capture.sketch import FOLDS, SMALL, sketch

LARGE = (701, 1501)  # more than a million elements, in no round number of rows


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_a_large_tensor_takes_a_thirtieth():
    kept = sketch(drawn(LARGE)).folded
    assert kept.numel() == math.ceil(701 * 1501 / FOLDS)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (SMALL,), (3, 5)])
def test_small_tensors_are_kept_exactly(shape: tuple[int, ...]):
    one, other = drawn(shape, 1), drawn(shape, 2)
    assert sketch(one).norm() == pytest.approx(float(one.double().norm()), rel=1e-14)
    assert sketch(one).distance(sketch(other)) == pytest.approx(
        float((one.double() - other.double()).norm()), rel=1e-14
    )


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("shape", [LARGE, (SMALL + 1,), (97, 101)])
def test_norms_and_distances_of_large_ones_are_estimated(shape: tuple[int, ...], scale: float):
    one = drawn(shape, 1, torch.float64)
    other = one + scale * drawn(shape, 2, torch.float64)
    expected = float((other - one).norm())
    # standard deviations of the squared norm, and rounding of the sum
    few = 4 / math.sqrt(math.prod(shape) / FOLDS)
    assert sketch(one).norm() == pytest.approx(float(one.norm()), rel=few)
    assert sketch(one).distance(sketch(other)) == pytest.approx(expected, rel=few + 1e-6)


@pytest.mark.parametrize("pattern", ["one", "row", "column", "constant", "alternating"])
def test_a_difference_of_any_pattern_is_seen(pattern: str):
    one = drawn(LARGE, 1)
    change = torch.zeros(LARGE)
    if pattern == "one":
        change[350, 750] = 1
    elif pattern == "row":
        change[-1] = 1
    elif pattern == "column":
        change[:, 3] = 1
    else:
        change += 1
        if pattern == "alternating":
            change[1::2] *= -1
    found = sketch(one).distance(sketch(one.double() + change.double()))
    assert found == pytest.approx(float(change.norm()), rel=0.1)


def test_equal_tensors_have_equal_sketches_whatever_their_strides():
    one = drawn(LARGE)
    assert sketch(one).distance(sketch(one.t().contiguous().t())) == 0.0
    assert sketch(one.to(torch.bfloat16)).distance(sketch(one.to(torch.bfloat16).float())) == 0.0


def test_parts_of_a_sum_add_up():
    one, other = drawn(LARGE, 1, torch.float64), drawn(LARGE, 2, torch.float64)
    assert (sketch(one) + sketch(other)).distance(sketch(one + other)) <= 1e-12 * float((one + other).norm())


@pytest.mark.parametrize("shape", [LARGE, (7,)])
def test_what_is_not_finite_is_equal_in_equal_places_only(shape: tuple[int, ...]):
    one = drawn(shape)
    for value in (math.inf, -math.inf, math.nan):
        wrong = one.clone()
        wrong.view(-1)[3] = value
        assert sketch(wrong).distance(sketch(wrong.clone())) == 0.0
        assert math.isfinite(sketch(wrong).norm())
        assert sketch(one).distance(sketch(wrong)) == math.inf == sketch(wrong).distance(sketch(one))
    assert sketch(torch.full(shape, math.inf)).distance(sketch(torch.full(shape, -math.inf))) == math.inf


def test_complex_and_sparse_tensors():
    one = torch.complex(drawn(LARGE, 1), drawn(LARGE, 2))
    assert sketch(one).norm() == pytest.approx(float(one.norm()), rel=0.02)
    dense = drawn((9, 3))
    assert sketch(dense.to_sparse()).distance(sketch(dense)) == 0.0


def test_shapes_that_differ_are_infinitely_far():
    assert sketch(torch.zeros(3, 2)).distance(sketch(torch.zeros(2, 3))) == math.inf


@pytest.mark.parametrize("factor", [1 + 1e-4, 0.0])
@pytest.mark.usefixtures("silent_export")
@pytest.mark.long
def test_a_wrong_gradient_of_a_large_parameter_is_found_and_nothing_is_left_behind(factor: float):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return factor * gradient

    wrong = False

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return F.linear(input, Scaled.apply(self.weight) if wrong else self.weight, self.bias)  # pyright: ignore[reportArgumentType]

    model: Any = nn.Sequential(nn.Linear(90, 301), nn.BatchNorm1d(301), Layer(301, 303))
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    program = capture_module(model, loss, (torch.randn(4, 90), torch.randn(4, 90)))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    kept = torch.ones_like(model[0].weight)
    model[0].weight.grad = kept
    check_against_module(program, model, loss, [torch.randn(4, 90), torch.randn(4, 90)])
    wrong = True
    with pytest.raises(CaptureError, match=r"the gradient of 2\.weight differs by"):
        check_against_module(program, model, loss, [torch.randn(4, 90)])
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model[0].weight.grad is kept and model[2].weight.grad is None
