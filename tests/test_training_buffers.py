"""Every chunk of a step reads buffers as the step found them, under every plan, and what chunks write is
merged in their order (docs/buffers.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.asynchronous.state.worker_replica import worker_replica_here
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, preserved_draws, seed_everything
from meshloom.replica.buffers import chunk_writes, recurrence
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.buffer_jobs import CASES, Annealed, Sliced, Trained, by_the_rule, job_of
from tests.covering import few

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
    marks: dict[tuple[str, str], Any] = {**dict.fromkeys(often, pytest.mark.long), **dict.fromkeys(usual, ())}
    rest = [
        (case, plan)
        for row, case in enumerate(CASES)
        for column, plan in enumerate(PLANS)
        if (row + column) % 2 == turn
    ]
    return [
        pytest.param(*each, marks=marks.get(each, pytest.mark.slow))
        for each in dict.fromkeys([*marks, *rest])
    ]


@pytest.mark.covering("moco-dp=2", "annealed")
@pytest.mark.parametrize(
    ("case", "plan"),
    combinations(
        [("annealed", "microbatches=4")],
        [("moco", "dp=2"), ("dino", PLANS[5]), ("shifted queue", "tp=2,microbatches=3")],
        0,
    ),
)
def test_a_plan_trains_by_the_rule(case: str, plan: str):
    found = trained(case, plan)
    agree(found, by_the_rule(case, copy.deepcopy(built(case)), Plan.parse(plan).num_chunks))


@pytest.mark.covering("spectral norm", "observed-dp=2")
@pytest.mark.parametrize(
    ("case", "plan"),
    combinations(
        [],
        [
            ("spectral norm", "dp=2"),
            ("observed", "dp=2"),
            # evaluation computes one number of two buffers, which training changes on two ranks
            ("observed", PLANS[8]),
            ("batch renorm", "tp=2,microbatches=3"),
            ("annealed", PLANS[8]),
        ],
        1,
    ),
)
def test_verify_holds_plans_to_the_rule(case: str, plan: str):
    report = verify(job_of(case), Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=3)
    assert report is not None and report.passed, (report.first_wrong, report.causes)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2", "microbatches=4"])
def test_a_queue_with_a_pointer_of_python_s_keeps_keys_labels_and_pointer_together(plan: str):
    """The story: where old and new labels are equal by chance in the first slots, the chunk seemed not to
    write them, and the tie to the pointer was missed."""
    report = verify(
        job_of("moco", model=Sliced, batch_size=8),
        Plan.parse(plan),
        devices="simulated",
        dtype=torch.float64,
        steps=4,
    )
    assert report is not None and report.passed, (report.first_wrong, report.causes)


@pytest.mark.long
def test_the_rule_is_said_in_one_line_where_a_job_needs_it(capsys: pytest.CaptureFixture[str]):
    rule = "as the step found them; what the chunks write is merged in their order (docs/buffers.md)."
    trained("moco", "dp=2")
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"meshloom: Every chunk of a step reads buffers queue, labels, pointer {rule}"
    ]
    trained("moco", "dp=1")
    assert "buffer" not in capsys.readouterr().err


class Joined(nn.Module):
    """Batch norm, a counter that the loss reads, and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 6))
        self.norm, self.annealed = nn.BatchNorm1d(6), Annealed()
        self.annealed.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.annealed(self.norm(self.first(x)))


@pytest.mark.long
@pytest.mark.slow
def test_with_synchronised_batch_statistics_microbatches_read_what_the_step_found():
    report = verify(
        job_of("annealed", model=Joined),
        Plan.parse("dp=2,microbatches=2,sync_batch_norm=true"),
        devices="simulated",
        dtype=torch.float64,
        steps=2,
    )
    assert report is not None and report.passed, (report.first_wrong, report.causes)


def reads_what_the_chunk_before_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_writes.TrackedBuffer, "put_back", lambda self: None)


def loses_the_keys_of_an_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_writes.ChunkWrites, "_tie", lambda self, one, other: None)


def merges_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = chunk_writes.ChunkWrites.take

    def take(self: Any) -> Tensor:
        self._chunks.reverse()
        return taken(self)

    monkeypatch.setattr(chunk_writes.ChunkWrites, "take", take)


def takes_the_last_of_a_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence._Search, "find", lambda self: recurrence.Written())


PLANTED: list[tuple[Any, str]] = [
    (reads_what_the_chunk_before_wrote, "annealed"),
    (loses_the_keys_of_an_advance, "moco"),
    (merges_in_another_order, "dino"),
    (takes_the_last_of_a_recurrence, "dino"),
]


@pytest.mark.covering(
    "reads_what_the_chunk_before_wrote-annealed-dp=2", "loses_the_keys", "merges_in_another", "takes_the_last"
)
@pytest.mark.parametrize(
    ("plant", "case", "plan"),
    [
        *few(((*planted, "dp=2,microbatches=2") for planted in PLANTED), 2),
        *(
            pytest.param(
                *planted,
                "pp=2,microbatches=4,schedule=zb-h1",
                marks=pytest.mark.slow if number else pytest.mark.long,
            )
            for number, planted in enumerate(PLANTED)
        ),
    ],
)
@pytest.mark.long
def test_a_planted_bug_is_found(plant: Any, case: str, plan: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    report = verify(job_of(case), Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=2)
    assert report is not None and not report.passed
    if plant is reads_what_the_chunk_before_wrote:
        assert [cause.kind for cause in report.causes] == ["buffers"]
    else:
        assert (
            report.first_wrong
            and report.first_wrong.failed("buffer")
            and not report.steps[0].failed("gradient")
        )


@pytest.mark.long
def test_a_worker_s_chunks_read_what_its_share_began_with():
    """Workers of an asynchronous run: one of them, as one device, the same by the rule."""
    worker = worker_replica_here(
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
