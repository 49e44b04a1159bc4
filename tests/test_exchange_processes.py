"""Servers, local steps and compressed gradients on rank processes: the same as on simulated ranks."""

from __future__ import annotations

import pytest
import torch

from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.jobs import make_job
from tests.processes import on_ranks
from tests.verified import verified


@pytest.mark.processes
@pytest.mark.parametrize(
    ("optimizer", "plan", "size"),
    [
        ("muon", "dp=3,exchange=server,servers=2,microbatches=2,bucket_bytes=600", 3),
        slow("adamw", "dp=4,exchange=server,servers=3", 4),
        slow("sgd", "dp=2,pp=2,microbatches=2,exchange=server", 4),
        slow("muon", "dp=2,tp=2,exchange=server,servers=2", 4),
    ],
)
def test_servers_on_processes_equal_one_device(optimizer: str, plan: str, size: int) -> None:
    assert on_ranks(verified, size, "gpt", optimizer, plan, timeout_seconds=150.0)[0] == "EQUAL"


def losses(plans: list[str], devices: str) -> list[list[float]]:
    """Of every step under each plan; bytes are as predicted, and replicas the same at the end."""
    found: list[list[float]] = []
    for plan in plans:
        with Trainer(
            make_job("gpt", "adamw", steps=4), plan, devices=devices, dtype=torch.float64
        ) as trainer:
            found.append([trainer.step(batch) for batch in trainer.batches()])
            summary = trainer.summary(0.0, {}, None)
            assert summary.predicted == summary.counted, plan
    return found


@pytest.mark.processes
@pytest.mark.parametrize("inner", ["", slow(",pp=2,microbatches=2"), slow(",tp=2,microbatches=2")])
def test_processes_and_simulated_ranks_give_the_same_losses(inner: str) -> None:
    kinds = [
        "exchange=local_sgd,local_steps=3",
        "exchange=diloco,local_steps=2",
        "compress=bf16",
        "compress=powersgd:2",
        "compress=topk:0.1",
    ]
    plans = [f"dp=2,{kind}{inner}" for kind in kinds]
    on_processes = on_ranks(losses, 4 if inner else 2, plans, "cpu", timeout_seconds=150.0)
    for plan, found, expected in zip(plans, on_processes[0], losses(plans, "simulated"), strict=True):
        assert found == pytest.approx(expected, rel=1e-9), plan  # float64; two ranks' sums have no order
