"""The norm that clipping uses is right in every precision, cheap or not."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.optimizer.clipping import clip, sum_of_squares

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-13), (torch.float32, 1e-8), (torch.bfloat16, 1e-6), (torch.complex64, 1e-8)],
)
def test_norm_of_many_elements(dtype: torch.dtype, rtol: float):
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    exact = float(
        torch.view_as_real(gradient).double().square().sum()
        if gradient.is_complex()
        else gradient.double().square().sum()
    )
    assert float(sum_of_squares([gradient, None, gradient[:0], gradient[:5]], CPU)) == pytest.approx(
        exact + float(gradient[:5].to(torch.complex128).abs().square().sum()), rel=rtol
    )


def test_nothing_owned_counts_as_zero():
    owned: list[list[Tensor | None]] = [[torch.tensor([3.0]), None], [], [torch.tensor([4.0])]]
    norms = in_turns(
        [partial(clip, mine, 1.0, group, CPU) for mine, group in zip(owned, simulated_groups(3), strict=True)]
    )
    assert norms == [5.0] * 3
    assert float(owned[0][0]) == pytest.approx(0.6) and float(owned[2][0]) == pytest.approx(0.8)  # type: ignore[arg-type]


def test_a_norm_that_is_no_number_spreads():
    gradients: list[Tensor | None] = [torch.tensor([math.nan, 1.0]), torch.tensor([2.0])]
    assert math.isnan(clip(gradients, 1.0, None, CPU))
    assert all(bool(each.isnan().all()) for each in gradients if each is not None)
