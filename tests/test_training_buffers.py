"""Every chunk of a step reads buffers as the step found them, under every plan, and what chunks write is
merged by the rules that the job declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer
from tests.buffer_jobs import CASES, job_of
from tests.covering import marked
from tests.verified import equals_one_device

PLANS = [
    "dp=2", "microbatches=4", "tp=2", "dp=3,microbatches=2,zero=1", "tp=2,microbatches=3", "dp=2,pp=2,tp=2,microbatches=2", "pp=2,microbatches=4,schedule=1f1b",
    "pp=2,microbatches=4,schedule=gpipe", "pp=2,microbatches=4,schedule=interleaved", "pp=2,microbatches=4,schedule=zb-h1",
]  # fmt: skip


def stepped(case: str, plan: str) -> None:
    with Trainer(job_of(case), plan, devices="simulated", dtype=torch.float64) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)


def combinations(usual: list[tuple[str, str]], often: list[tuple[str, str]], turn: int) -> list[Any]:
    """What is usual or often; and, in `make test-all`, every other case and plan, in turn, so that each pair
    of them is in one of two tests."""
    rest = [
        (case, plan)
        for row, case in enumerate(CASES)
        for column, plan in enumerate(PLANS)
        if (row + column) % 2 == turn
    ]
    return marked(usual, often, rest)


@pytest.mark.covering("moco-dp=2", "annealed")
@pytest.mark.parametrize(
    ("case", "plan"),
    combinations(
        [("annealed", "microbatches=4")],
        [("moco", "dp=2"), ("dino", PLANS[5]), ("shifted queue", "tp=2,microbatches=3")],
        0,
    ),
)
@pytest.mark.long
def test_a_plan_trains_by_the_rule(case: str, plan: str):
    """Verification has the rules a second time; `test_buffers.py` compares them with a plain loop."""
    equals_one_device(job_of(case), plan, steps=4, quick=False)


@pytest.mark.long
def test_the_rule_is_said_in_one_line_where_a_job_needs_it(capsys: pytest.CaptureFixture[str]):
    stepped("moco", "dp=2")
    assert capsys.readouterr().err.splitlines()[1:] == [
        "meshloom: Of queue, labels, pointer a step keeps what its last chunk left. Another rule is said by the job, like "
        'Job(buffers={"queue": "sum"}) or ml.ema(0.99) (docs/contract.md).'
    ]
    stepped("moco", "dp=1")
    stepped("dino", "dp=2")
    assert "keeps what" not in capsys.readouterr().err


@pytest.mark.long
def test_a_worker_s_chunks_read_what_its_share_began_with():
    """Workers of an asynchronous run: one of them, as one device, the same by the rule."""
    worker = WorkerReplica(
        job_of("annealed"), Plan.parse("exchange=async,dp=1,microbatches=4"), dtype=torch.float64
    )
    with Trainer(job_of("annealed"), "microbatches=4", devices="simulated", dtype=torch.float64) as trainer:
        batch = next(iter(trainer.batches()))
        computed = worker.compute(0, batch.shares[0])
        assert computed.loss == pytest.approx(trainer.step(batch), rel=1e-9)
    assert int(worker.model.get_buffer("steps")) == 8 and int(computed.changes["steps"]) == 8
