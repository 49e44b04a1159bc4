"""Rounding that no perturbed parameter shows: a saturated softmax multiplies sums of parts by 1 - p."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.exchange.alone import Alone
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import backward_effect, outputs_effect, rounding_effect
from meshloom.verify.tolerances.gradient_errors import GradientErrors, Measure
from tests.jobs import Samples
from tests.verified import equals_one_device, report_on

pytestmark = [pytest.mark.usefixtures("silent_export")]


class Experts(nn.Module):
    """[tokens, 8] plus two experts' outputs, mixed by a gate; wide enough to be divided along their width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.bias = (
            nn.Parameter(torch.randn(2, 8, width) / 8**0.5),
            nn.Parameter(torch.randn(2, width)),
        )
        self.down, self.last = (
            nn.Parameter(torch.randn(2, width, 8) / width**0.5),
            nn.Parameter(torch.randn(2, 8)),
        )
        self.gate = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("td,edf->tef", x, self.up) + self.bias)
        outputs = torch.einsum("tef,efd->ted", hidden, self.down) + self.last
        return x + (outputs * self.gate(x).softmax(-1)[..., None]).sum(1)


def rows() -> Samples:
    return Samples(
        x=torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(row)) for row in range(32)]), y=torch.arange(32) % 8
    )  # fmt: skip


def job_of(width: int = 4096, rate: float = 1e-2) -> Job:
    """Its gates are saturated after the first update."""
    return Job(
        model=lambda: nn.Sequential(Experts(width), Experts(width)), loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=lambda named: torch.optim.AdamW(named, lr=rate), data=rows,
        batch_size=4, steps=6,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
@pytest.mark.long
def test_a_saturated_gate_is_equal(dtype: torch.dtype) -> None:
    """The story: the gate's gradient was off by 4.5e-8, exact arithmetic is 1.1e-7 from one device, and perturbed parameters moved it by 2e-14."""
    equals_one_device(job_of(), "tp=2", dtype=dtype)


class Gated(nn.Module):
    """Two numbers of each row, of which the gate takes the first: softmax [1 - 1e-8, 1e-8]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 2)
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([18.4, 0.0]))
            self.gate.weight.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gate(x).softmax(-1) * torch.tensor([512.3, 1.7]).to(x)).sum(-1)


def test_only_other_rounding_in_backward_moves_the_gradient_of_a_saturated_gate() -> None:
    job = Job(
        model=Gated, loss=lambda model, batch: model(batch["x"]).mean(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: Samples(x=torch.randn(8, 3)), batch_size=4, steps=1,
    )  # fmt: skip
    reference, name, rounding = Reference(job, Plan.parse("tp=2"), torch.float64), "gate.weight", 2.2e-16
    reference.run()
    gradient = reference.gradients[name]
    assert gradient is not None
    size, before = float(gradient.norm()), gradient.clone()
    for measured in (rounding_effect(reference)[0], outputs_effect(reference)):
        assert measured[name] < 1e3 * rounding * size
    assert 1e5 * rounding * size < backward_effect(reference)[name] < 1e-4 * size
    after = reference.gradients[name]
    assert after is not None and torch.equal(after, before)


@pytest.mark.long
def test_a_wrong_gradient_of_a_saturated_gate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Alone.gather

    def scaled(self: Any, gradients: Any, emit: Any) -> Any:
        def other(name: str, gradient: Tensor | None) -> Any:
            return emit(
                name, gradient * 1.001 if name == "1.gate.weight" and gradient is not None else gradient
            )

        return right(self, gradients, other)

    monkeypatch.setattr(Alone, "gather", scaled)
    report = report_on(job_of(), "tp=2")
    assert report.first_wrong is not None
    assert "1.gate.weight" in report.first_wrong.failed("gradient")


@pytest.mark.parametrize(("off", "passes"), [(1.8, True), (1e2, False)])
def test_a_gradient_whose_terms_cancel_may_be_off_by_what_rounding_makes_of_them(
    off: float, passes: bool
) -> None:
    """A bias before a batch norm in float32 was off by 1.8 of itself, where 1.4 were allowed: a share of the largest gradient."""
    right = {"weight": torch.ones(4), "bias": torch.full((4,), 1.4e-6)}
    ours = right["bias"] * (1 + off)
    alone: list[Measure] = [lambda: {"bias": 2e-6}]
    assert not GradientErrors(right, 0, measures=alone).compare("bias", ours).passed
    with_terms = GradientErrors(right, 0, measures=alone, of_terms=lambda: {"bias": 4e-6})
    found = with_terms.compare("bias", ours)
    assert found.noise and found.passed == passes


def test_a_wrong_gradient_that_is_no_noise_has_the_tolerance_of_others() -> None:
    right = {"weight": torch.ones(4), "bias": torch.full((4,), 0.1)}
    errors = GradientErrors(right, 0, measures=[lambda: {"bias": 1e-4}], of_terms=lambda: {"bias": 1e-2})
    found = errors.compare("bias", right["bias"] * 1.1)
    assert not found.passed and not found.noise and found.tolerance < 0.06


def test_operators_that_torch_cannot_take_apart_are_moved_whole() -> None:
    """A convolution, an embedding bag and a norm: each gradient moves by rounding, and by no more."""
    model = partial(nn.Sequential, nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(36, 3))
    job = Job(
        model=model, loss=lambda model, batch: model(batch["x"]).square().mean(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: Samples(x=torch.randn(8, 2, 8)), batch_size=4, steps=1,
    )  # fmt: skip
    reference = Reference(job, Plan.parse("tp=2"), torch.float64)
    reference.run()
    for name, moved in backward_effect(reference).items():
        gradient = reference.gradients[name]
        assert gradient is not None and 0 < moved < 1e-12 * float(gradient.norm())
