"""Asynchronous plans whose workers are divided along pp and tp, on simulated devices: against workers of one
rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.test_asynchronous import Run

pytestmark = pytest.mark.long

PLANS = [
    "tp=2",
    "pp=2",
    "pp=2,tp=2",
    "pp=2,microbatches=2,schedule=interleaved,virtual_stages=2",
    "recompute=full,microbatches=2",
]


def whole(plan: str) -> str:
    """The same chunks on one rank."""
    return ",".join(each for each in plan.split(",") if each.startswith("microbatches"))


def run(job: Job, *settings: str, **how: object) -> Run:
    return Run(job, ",".join(filter(None, ("keyed_draws=true", *settings))), dtype=torch.float64, **how)


def assert_alike(a: Run, b: Run) -> None:
    assert a.state.keys() == b.state.keys()
    for name, value in a.state.items():
        # float64, sums in another order over the steps of a run
        torch.testing.assert_close(value, b.state[name], rtol=1e-9, atol=1e-11)
    assert [each.loss for each in a.steps] == pytest.approx([each.loss for each in b.steps], rel=1e-10)


COVERED = [(PLANS[0], "gpt"), (PLANS[1], "cnn"), (PLANS[2], "unused_twice"), (PLANS[4], "mlp")]
OTHERS = [
    (plan, model)
    for plan in PLANS
    for model in ("gpt", "cnn", "unused_twice", "mlp")
    if (plan, model) not in COVERED
]


@pytest.mark.covering("pp=2-cnn", "recompute=full")
@pytest.mark.usefixtures("dear_memory")  # so that tp shards
@pytest.mark.parametrize(
    ("plan", "model"), [*COVERED, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
@pytest.mark.slow
def test_one_divided_worker_is_one_device(plan: str, model: str) -> None:
    """A scheduler, dropout, batch statistics, unused parameters; what is sent inside the worker is what was
    predicted."""
    job = make_job(model, "adamw", steps=4)
    divided = run(job, "exchange=async", plan)
    assert_alike(divided, run(job, whole(plan)))
    for axis in ("pp", "tp"):
        assert divided.summary.predicted.bytes.get(axis) == divided.summary.counted.bytes.get(axis)
        assert bool(divided.summary.counted.bytes.get(axis)) == (f"{axis}=" in plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_several_divided_workers_are_several_whole_ones(plan: str) -> None:
    """The same speeds, two servers, one worker that is killed and one that joins."""
    job = make_job("gpt", "sgd", steps=12)
    how = {
        "step_seconds": (1.0, 1.3, 2.1),
        "latency_seconds": 0.05,
        "incidents": "kill:1@2.5+join:3@3+server:0@4.2/1",
        "snapshot_every": 2,
    }
    a, b = (
        run(job, "dp=3,exchange=async,servers=2,staleness=3", each, **how) for each in (plan, whole(plan))
    )
    assert a.ages == b.ages and a.notes == b.notes
    assert_alike(a, b)


@pytest.mark.slow
def test_a_divided_run_evaluates_saves_and_is_resumed(tmp_path: Path) -> None:
    def right(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).argmax(-1) == batch["y"]).double().mean()

    job = make_job("mlp", "adamw", steps=8, checkpoint_every=4)
    job = replace(job, evaluate=Evaluate(job.data, {"right": right}, every=4))
    plan = "dp=2,tp=2,exchange=async"
    unbroken = run(job, plan, out=tmp_path / "a")
    run(job, plan, out=tmp_path / "b", steps=4)
    resumed = run(job, "dp=2,exchange=async", resume=tmp_path / "b")  # by workers of one rank
    assert [step for step, _ in unbroken.evaluations] == [4, 8]
    assert_alike(run(job, plan, resume=tmp_path / "b"), resumed)
    assert unbroken.evaluations == [
        (step, pytest.approx(values)) for step, values in run(job, "dp=2,exchange=async").evaluations
    ]


@pytest.mark.long
def test_a_loss_that_is_no_number_is_the_worker_s_and_its_rank_is_named() -> None:
    job = make_job("mlp", "sgd", steps=4)

    def broken(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).sub(1e9).log().mean()

    with pytest.raises(
        TrainingError,
        match=r"Worker 0: The loss of step 0 is nan: rank 1, microbatch 0; the first operator that gives NaN is log",
    ):
        Run(replace(job, loss=broken), "dp=2,pp=2,exchange=async")


@pytest.mark.slow
def test_gradients_of_a_divided_worker_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the first rank forgets what the last stage computed. The comparison above finds it."""
    from meshloom.asynchronous.state import worker_replica

    original = worker_replica.full_gradients

    def forgetful(replica, found):
        whole = yield from original(replica, found)
        last = list(whole)[-1:]
        return {name: None if name in last else each for name, each in whole.items()}

    job = make_job("mlp", "sgd", steps=3)
    monkeypatch.setattr(worker_replica, "full_gradients", forgetful)
    wrong = run(job, "pp=2,exchange=async")
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_alike(wrong, run(job))


@pytest.mark.slow
def test_a_rank_of_a_divided_worker_holds_a_part() -> None:
    job = make_job("gpt", "sgd", steps=1)
    with Trainer(job, "dp=2,pp=2,tp=2,exchange=async", devices="simulated") as trainer:
        assert trainer.asynchronous
        team = trainer.asynchronous._replica
        whole_size = sum(each.numel() for each in team.model.parameters())
        held = [
            sum(each.numel() for each in replica.model.parameters() if not each.is_meta)
            for replica in team._replicas
        ]
    assert len(held) == 4 and max(held) < 0.6 * whole_size, (held, whole_size)
