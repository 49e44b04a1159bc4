"""Every chunk of a step reads buffers as the step found them, under every plan, and what chunks write is
merged by the rules that the job declares."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, preserved_draws, seed_everything
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from tests.buffer_jobs import CASES, Trained, by_the_rule, job_of
from tests.covering import marked

PLANS = [
    "dp=2", "microbatches=4", "tp=2", "dp=3,microbatches=2,zero=1", "tp=2,microbatches=3", "dp=2,pp=2,tp=2,microbatches=2", "pp=2,microbatches=4,schedule=1f1b",
    "pp=2,microbatches=4,schedule=gpipe", "pp=2,microbatches=4,schedule=interleaved", "pp=2,microbatches=4,schedule=zb-h1",
]  # fmt: skip


def built(case: str) -> nn.Module:
    """The model as every run of the job starts from it."""
    job = job_of(case)
    with preserved_draws():
        seed_everything(model_seed(job.seed))
        return job.model()


def trained(case: str, plan: str) -> Trained:
    """Steps with evaluations between them, in float64."""
    with Trainer(job_of(case), Plan.parse(plan), devices="simulated", dtype=torch.float64) as trainer:
        losses: list[float] = []
        metrics: list[float] = []
        for batch in trainer.batches():
            losses.append(trainer.step(batch))
            metrics.append(trainer.evaluate()["loss"])
        state = {name: each.clone().cpu() for name, each in trainer.together(full_state)[0].items()}
    return Trained(losses, metrics, state)


def agree(found: Trained, expected: Trained) -> None:
    """rtol 1e-9: float64, other orders of sums, amplified by four steps and by normalisation."""
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(
        torch.tensor(found.metrics), torch.tensor(expected.metrics), rtol=1e-9, atol=1e-9
    )
    for name, value in expected.state.items():
        torch.testing.assert_close(
            found.state[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


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
    found = trained(case, plan)
    agree(found, by_the_rule(case, copy.deepcopy(built(case)), Plan.parse(plan).num_chunks))


@pytest.mark.long
def test_the_rule_is_said_in_one_line_where_a_job_needs_it(capsys: pytest.CaptureFixture[str]):
    trained("moco", "dp=2")
    assert capsys.readouterr().err.splitlines()[1:] == [
        "meshloom: Of queue, labels, pointer a step keeps what its last chunk left. Another rule is said by the job, like "
        'Job(buffers={"queue": "sum"}) or ml.ema(0.99) (docs/contract.md).'
    ]
    trained("moco", "dp=1")
    trained("dino", "dp=2")
    assert "keeps what" not in capsys.readouterr().err


@pytest.mark.long
def test_a_worker_s_chunks_read_what_its_share_began_with():
    """Workers of an asynchronous run: one of them, as one device, the same by the rule."""
    worker = WorkerReplica(
        job_of("annealed"), Plan.parse("exchange=async,dp=1,microbatches=4"), dtype=torch.float64
    )
    expected = by_the_rule("annealed", copy.deepcopy(worker.model), 4, steps=1)
    batches = trained_batches("annealed")
    computed = worker.compute(0, batches)
    assert computed.loss == pytest.approx(expected.losses[0], rel=1e-9)
    assert int(worker.model.get_buffer("steps")) == 8 and int(computed.changes["steps"]) == 8


def trained_batches(case: str) -> Any:
    """The chunks of the first step of four microbatches."""
    with Trainer(
        job_of(case), Plan.parse("microbatches=4"), devices="simulated", dtype=torch.float64
    ) as trainer:
        return next(iter(trainer.batches())).shares[0]
