"""Parameter servers: optimizers that look at everything, what workers hold, and checkpoints from and to other plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.train.trainer import Trainer
from tests.jobs import GPT, make_job
from tests.verified import equals_one_device

ONE, THREE = (
    "dp=3,exchange=server,microbatches=2,bucket_bytes=600",
    "dp=4,exchange=server,servers=3,bucket_bytes=600",
)


class ByWholeNorm(torch.optim.SGD):
    """Divides each step by the norm of all parameters together."""

    def step(self, closure: Any = None) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = (
            torch.stack([each.detach().norm() for each in parameters]).norm()
            if parameters
            else torch.ones(())
        )
        for each in parameters:
            if each.grad is not None:
                each.data.sub_(each.grad, alpha=float(0.1 / norm))


@pytest.mark.long
def test_an_optimizer_that_looks_at_everything_runs_on_every_server() -> None:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        return ByWholeNorm(named, lr=0.1)

    job = replace(make_job("mlp", "sgd", batch_size=13), optimizer=optimizer)
    equals_one_device(job, THREE, steps=3)
    with Trainer(job, THREE, devices="simulated") as trainer:
        held = [len(replica.updater.updated.held[0]) for replica in trainer.replicas]
    assert held == [6, 6, 6, 0]


@pytest.mark.long
def test_workers_update_nothing_and_hold_no_state() -> None:
    with Trainer(make_job("gpt", "muon", steps=1), THREE, devices="simulated") as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        states = [[each.state for each in replica.updater._optimizers] for replica in trainer.replicas]
        shares = [
            sum(piece.stop - piece.start for piece in replica.exchange.ownership.owned)
            for replica in trainer.replicas
        ]
    assert [any(state for state in each) for each in states] == [True, True, True, False]
    # buckets of 600 bytes are padded
    assert shares[3] == 0 and max(shares[:3]) - min(shares[:3]) < 0.05 * sum(shares)


SLOW = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("sgd", marks=SLOW),
        pytest.param("adamw", marks=SLOW),
        "muon",
        pytest.param("adafactor", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (THREE, "dp=2,zero=1"),
        ("dp=1,microbatches=4", THREE),
        pytest.param(THREE, ONE, marks=SLOW),
        pytest.param("dp=2,tp=2", ONE, marks=SLOW),
    ],
)
def test_checkpoints_come_from_and_go_to_any_plan(
    optimizer: str, first: str, then: str, tmp_path: Path
) -> None:
    # draws belong to chunks, and these to plans
    job = replace(make_job("gpt", optimizer, steps=6), model=lambda: GPT(dropout=0.0))
    with Trainer(job, "dp=1,microbatches=4", devices="simulated", dtype=torch.float64) as trainer:
        expected = [trainer.step(batch) for batch in trainer.batches()]
    with Trainer(job, first, devices="simulated", steps=3, out=tmp_path, dtype=torch.float64) as trainer:
        trainer.fit()
    with Trainer(job, then, devices="simulated", resume=tmp_path, dtype=torch.float64) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
    assert found == pytest.approx(expected[3:], rel=1e-9)  # float64, sums in other orders
