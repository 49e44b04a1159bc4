"""Runs with a part that is not read resume from each other's checkpoints, under whatever plan: parameters, buffers
that the part writes, and draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshloom.core.buffer_rules import ema
from tests.fitted import fitted
from tests.opaque_jobs import Counts, Drops, Net, Normed, job_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def trained(plan: str, out: Path, *, steps: int, resume: Path | None = None) -> dict[str, Tensor]:
    """What the checkpoint has after so many steps."""
    parts = job_of(lambda: Net([Counts(), Drops(), Normed()], "r0r12r"), buffers={"parts.0.mean": ema(0.9)})
    job = replace(parts, steps=6)
    fitted(job, f"{plan},keyed_draws=true", cache="off", out=out, steps=steps, resume=resume, dtype=torch.float64)  # fmt: skip
    return load_file(out / f"step-{steps:08d}" / "model.safetensors")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=2,microbatches=2", "pp=2,microbatches=2"),
        ("dp=2,zero=3", "dp=2,pp=2,tp=2"),
        ("dp=2,pp=2,tp=2", "dp=1,microbatches=2"),
    ],
)
@pytest.mark.slow
def test_a_run_resumes_under_another_plan(first: str, second: str, tmp_path: Path):
    expected = trained("dp=1,microbatches=2", tmp_path / "one", steps=6)
    trained(first, tmp_path / "run", steps=3)
    found = trained(second, tmp_path / "run", steps=6, resume=tmp_path / "run")
    assert found.keys() == expected.keys() and found["parts.0.mean"].abs().sum() > 0
    for name, each in expected.items():
        assert torch.allclose(found[name], each, rtol=0.0, atol=1e-10), name
