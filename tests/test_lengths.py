"""A job that pads each batch to its longest sample, so that almost every step has another length, costs three
captures and is trained as on one device.

Every length used to be read for itself: 200 steps of lengths 32 to 512 were 200 readings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.core.job import Evaluate, Job
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.jobs import token_loss
from tests.length_jobs import Lengths, Texts, lengths_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

# plan, share of values that are dropped, the same on one device: in as many chunks if something is drawn
PLANS = [
    ("dp=2", 0.0, "dp=1"),
    ("pp=2,microbatches=2", 0.0, "dp=1"),
    ("tp=2,keyed_draws=true", 0.1, "dp=1,keyed_draws=true"),
]
SAID = "The loss was captured 3 times: one program serves batches of any size."


def trained(job: Job, plan: str, **settings: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Parameters at the end, and what the user was told besides."""
    notes: list[str] = []
    listener = Listener(started=lambda text: None, note=notes.append)
    with Trainer(
        job, plan, devices="simulated", dtype=torch.float64, listener=listener, **settings
    ) as trainer:
        trainer.fit()
        return trainer.together(full_state)[0], notes


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        # sums in another order, through Adam's quotients
        torch.testing.assert_close(found[name], each, rtol=1e-7, atol=1e-9)


@pytest.mark.covering("dp=2-0.0-dp=1-short")
@pytest.mark.parametrize(("lengths", "steps"), [((3, 24), 14), slow((32, 512), 200)], ids=["short", "long"])
@pytest.mark.parametrize(("plan", "dropout", "alone"), PLANS)
def test_three_captures_serve_a_job_that_pads_to_its_longest(
    lengths: tuple[int, int], steps: int, plan: str, dropout: float, alone: str
):
    """Whatever the lengths are; also the smaller batch at the end of an epoch, and microbatches of 5 and 4
    samples."""
    job = lengths_job(shortest=lengths[0], longest=lengths[1], steps=steps, dropout=dropout)
    found, notes = trained(job, plan)
    check_same(found, trained(job, alone)[0])
    assert notes == ([] if plan == "dp=2" else [SAID])


class Growing(Lengths):
    """Six samples each of length 3, 4, ..., every second one shorter by one."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4 + index // 6 - index % 2,), index % 90 + 1)


@pytest.mark.parametrize("plan", ["tp=2", slow("pp=2,microbatches=2")])
def test_forty_lengths_take_three_captures(plan: str):
    """And the smaller batch at the end."""
    job = lengths_job(
        data=lambda: Growing(6 * 39 + 4, 3, 42), model=lambda: Texts(8, 2, 2), batch_size=6, steps=40, shuffle=False
    )  # fmt: skip
    found, notes = trained(job, plan)
    check_same(found, trained(job, "dp=1")[0])
    assert notes == [SAID]


@pytest.mark.slow
def test_it_is_evaluated_and_resumed(tmp_path: Path):
    """In a job that evaluates and saves in the middle of an epoch, computing some of it again in backward."""
    job = lengths_job(
        steps=8,
        checkpoint_every=4,
        evaluate=Evaluate(data=lambda: Lengths(20, 3, 24), metrics={"loss": token_loss}, every=4),
    )
    alone, _ = trained(job, "dp=1")
    plan = "pp=2,microbatches=2,recompute=full"
    trained(job, plan, steps=4, out=tmp_path)
    found, _ = trained(job, plan, resume=tmp_path)
    check_same(found, alone)
