"""Losses that take gradients on real processes equal one device."""

from __future__ import annotations

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.gradient_jobs import gradient_job
from tests.processes import on_ranks

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.usefixtures("silent_export")]


def _verified(name: str, plan: str) -> bool | str | None:
    report = verify(gradient_job(name), Plan.parse(plan), devices="cpu", steps=2, dtype=torch.float64)
    return None if report is None else report.passed or str(report.causes)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("heat equation", "tp=2,tp_placements=0:column+2:row"),
        pytest.param("maml", "pp=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param("hamiltonian", "dp=2,zero=3", marks=pytest.mark.slow),
        pytest.param("equilibrium", "tp=2,tp_placements=inner:column", marks=pytest.mark.slow),
    ],
)
def test_on_two_processes_it_is_one_devices(name: str, plan: str):
    (outcome, *_) = on_ranks(_verified, 2, name, plan, timeout_seconds=200.0)
    assert outcome is True
