"""`meshloom.gather`: a loss over pairs of samples is that of one device on the whole batch, whatever the replicas."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshloom as ml
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CaptureError, JobError, PlanError
from meshloom.core.job import NamedParameters
from meshloom.core.moments.current_step import at_step
from meshloom.replica.exchanges import gathered_rows
from meshloom.replica.exchanges.gathered_rows import joined_rows, summed_rows
from meshloom.telemetry.progress import QUIET
from tests.covering import few
from tests.processes import on_ranks
from tests.verified import report_on

# sums run per rank and then over ranks, instead of over all rows at once, for six steps of AdamW
EXACT: Any = {"rel": 1e-10, "abs": 1e-10}


class Towers(nn.Module):
    """Two encoders whose outputs are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 16))
        self.b = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1), self.scale.exp()


class Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Views of items; `kind` is an item's class, `number` its place."""

    def __init__(self, num_items: int = 64) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        return {
            "x": torch.randn(12, generator=g), "y": torch.randn(10, generator=g), "kind": i % 5, "number": i, "weight": float(i % 3 + 1),
        }  # fmt: skip


def whole(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """InfoNCE of all rows, which every replica computes."""
    a, b, scale = model(batch["x"], batch["y"])
    a, b = ml.gather(a), ml.gather(b)
    logits = scale * a @ b.T
    t = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, t) + F.cross_entropy(logits.T, t)) / 2


def own_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same, of a replica's own rows against all others."""
    a, b, scale = model(batch["x"], batch["y"])
    same = scale * (a * b).sum(-1)
    there, back = scale * a @ ml.gather(b).T, scale * b @ ml.gather(a).T
    return ((there.logsumexp(1) - same) + (back.logsumexp(1) - same)).mean() / 2


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, weight), with the own rows found by their numbers."""
    a, b, scale = model(batch["x"], batch["y"])
    target = (batch["number"][:, None] == ml.gather(batch["number"])).long().argmax(1)
    each = F.cross_entropy(scale * a @ ml.gather(b).T, target, reduction="none")
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def supervised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Pulls together what is of one class, among two views of every item: twice as many rows as samples."""
    a, b, scale = model(batch["x"], batch["y"])
    rows, kinds = torch.cat([a, b]), batch["kind"].repeat(2)
    alike = kinds[:, None] == ml.gather(kinds)
    logits = (scale * rows @ ml.gather(rows).T).log_softmax(1)
    return -((logits * alike).sum(1) / alike.sum(1)).mean()


def adamw(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for _, each in named], lr=1e-2)


def job_of(loss: Any = whole, model: Any = Towers, num_items: int = 64, **changes: Any) -> ml.Job:
    settings: dict[str, Any] = {"optimizer": adamw, "batch_size": 8, "steps": 6, **changes}
    return ml.Job(model=model, loss=loss, data=lambda: Pairs(num_items), **settings)


def losses_of(job: ml.Job, plan: str, **options: Any) -> list[float]:
    """Of every step; what is sent is what is predicted."""
    options = {"devices": "simulated", "dtype": torch.float64, **options}
    with ml.Trainer(job, plan, listener=QUIET, **options) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
        summary = trainer.summary(0.0, {}, None)
        assert summary.predicted == summary.counted
        return found


def verified(job: ml.Job, plan: str, steps: int = 3, dtype: torch.dtype | None = torch.float64) -> Any:
    return report_on(job, plan, steps=steps, dtype=dtype)


# --- Equal to one device, on the same chunks and on the whole batch.

PLANS = [
    "dp=4", "dp=2", "dp=2,zero=3", "dp=4,zero=1", "dp=2,zero=2", "dp=3,shares=4+2+1", "dp=2,exchange=server", "dp=2,keyed_draws=true",
]  # fmt: skip


@pytest.mark.parametrize("plan", few(PLANS, 4, pytest.mark.slow))
@pytest.mark.long
def test_the_loss_over_pairs_is_that_of_the_whole_batch(plan: str):
    one = losses_of(job_of(), "dp=1")
    # replicas that compare local pairs have 0.656 under dp=4
    assert one[0] == pytest.approx(2.0728, abs=1e-4)
    assert losses_of(job_of(), plan) == pytest.approx(one, **EXACT)


@pytest.mark.parametrize(
    ("loss", "plan"),
    [(whole, "dp=4"), (own_rows, "dp=2,zero=3"), (weighted, "dp=3,shares=4+2+1"), pytest.param(supervised, "dp=2", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.long
def test_verification_runs_the_chunks_together(loss: Any, plan: str):
    """Also the last batch of an epoch, in which shares differ."""
    report = verified(job_of(loss, num_items=25, batch_size=10), plan)
    assert report.passed, report.worst()
    assert report.whole.equal


class Mixing(nn.Module):
    """Rows of all samples decide what each becomes, which is gathered again; a queue keeps the newest ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 16)
        )
        self.mix, self.b = nn.Linear(16, 16), nn.Linear(10, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("queue", torch.zeros(25, 16))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.a(x)
        others = ml.gather(a)
        a = a + self.mix(torch.softmax(a @ others.T, 1) @ others)
        with torch.no_grad():
            self.queue = torch.cat([ml.gather(F.normalize(a)), self.queue])[:25]
        return a, self.b(y), self.scale


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=3,zero=3", marks=pytest.mark.slow)])
@pytest.mark.long
def test_draws_and_statistics_stay_those_of_a_chunk(plan: str):
    """Of gathers that follow from each other; the last batch is short. One device on the whole batch draws otherwise."""
    report = verified(job_of(model=Mixing, num_items=20, batch_size=11), plan)
    assert report.passed, report.worst()
    assert not report.whole.equal and "random draws" in report.whole.why


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("fp16-mixed", marks=pytest.mark.slow)])
@pytest.mark.long
def test_low_precision_has_the_bits_of_one_device(precision: str):
    report = verified(job_of(own_rows), f"dp=2,precision={precision}", dtype=None)
    assert report.passed, report.worst()


@pytest.mark.long
def test_joined_statistics_and_gathered_rows_are_one_chunk():
    class Norms(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.a.insert(1, nn.BatchNorm1d(24))

    report = verified(job_of(model=Norms), "dp=2,sync_batch_norm=true")
    assert report.passed and report.whole.equal


@pytest.mark.long
def test_an_optimizer_that_evaluates_the_loss_gathers_each_time():
    def lbfgs(named: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([each for _, each in named], lr=0.1, max_iter=3)

    job = job_of(own_rows, optimizer=lbfgs, steps=3)
    assert losses_of(job, "dp=2") == pytest.approx(losses_of(job, "dp=1"), **EXACT)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda grad, rows, group: grad.split(list(rows))[group.rank],  # of a replica's own use alone
        lambda grad, rows, group: summed_rows(grad, rows, group) / group.size,
        lambda grad, rows, group: summed_rows(grad, rows, group).roll(1, 0),
    ],
)
@pytest.mark.long
def test_gradients_that_are_not_added_up_are_found(mistake: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathered_rows, "summed_rows", mistake)
    job = job_of(own_rows)
    with pytest.raises(AssertionError):
        assert losses_of(job, "dp=2") == pytest.approx(losses_of(job, "dp=1"), **EXACT)
    assert not verified(job, "dp=2", steps=1).passed


def on_a_rank(loss: Any, plan: str, transport: str) -> list[float]:
    return losses_of(job_of(loss, num_items=25, batch_size=10), plan, devices="auto", transport=transport, share=True)  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(
    ("loss", "plan", "transport"),
    [
        (whole, "dp=2", "auto"),
        (own_rows, "dp=2,zero=3", "gloo"),
        pytest.param(weighted, "dp=2,zero=1", "gloo", marks=pytest.mark.slow),
        pytest.param(supervised, "dp=4", "auto", marks=pytest.mark.slow),
    ],
)
def test_processes_have_the_losses_of_one_device(loss: Any, plan: str, transport: str):
    one = losses_of(job_of(loss, num_items=25, batch_size=10), "dp=1")
    for found in on_ranks(on_a_rank, ml.Plan.parse(plan).dp, loss, plan, transport):
        assert found == pytest.approx(one, **EXACT)


# --- What is exchanged.


@pytest.mark.parametrize("rows", [[3, 1, 2], [2, 2], [0, 4, 0], [0, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_rows_are_joined_and_gradients_summed_as_in_one_tensor(rows: Sequence[int], dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)

    def drawn(number: int) -> Tensor:
        values = torch.randn(number, 5, 2, generator=generator, dtype=torch.float64) * 3
        return values.round().to(dtype).transpose(1, 2)  # small integers, whose sums every dtype has

    parts, grads = [drawn(each) for each in rows], [drawn(sum(rows)) for _ in rows]
    groups = simulated_groups(len(rows))

    def rank(number: int) -> tuple[Tensor, Tensor | None]:
        here = joined_rows(parts[number], rows, groups[number])
        floating = dtype.is_floating_point or dtype.is_complex
        return here, summed_rows(grads[number], rows, groups[number]) if floating else None

    expected = torch.stack([each.to(torch.complex128) for each in grads]).sum(0).split(list(rows))
    results = in_turns([lambda number=number: rank(number) for number in range(len(rows))])
    for (joined, summed), own in zip(results, expected, strict=True):
        assert torch.equal(joined, torch.cat(parts))
        assert summed is None or (summed.dtype == dtype and torch.equal(summed.to(torch.complex128), own))


@pytest.mark.long
def test_a_replica_that_makes_no_use_of_the_rows_still_sends_their_gradients():
    """Its loss does not depend on them, and the others' do."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b, scale = model(batch["x"], batch["y"])
        others, _ = ml.gather(b), ml.gather(a)
        known = ml.gather(batch["number"])
        use = (batch["number"][0] == known[0]).to(a)  # the first replica alone
        return (scale * a @ others.T).logsumexp(1).mean() if use else (scale * a * b).sum(-1).mean()

    report = verified(job_of(loss), "dp=2")
    assert report.passed, report.worst()


def test_outside_of_a_plan_it_returns_what_it_is_given():
    x = torch.ones(3, 2, requires_grad=True)
    assert ml.gather(x) is x
    with pytest.raises(JobError, match="a tensor without dims"):
        ml.gather(torch.tensor(1.0))
    assert ml.gather([x]) == [x]
    with at_step(3):
        with pytest.raises(JobError, match="not a list"):
            ml.gather([x])
        with pytest.raises(JobError, match="for loops of one's own"):
            ml.sum(x)


# --- What is refused.


def counted(losses: Sequence[Any]) -> Any:
    """A loss that is one of these after another, as replicas of a step come to it."""
    calls = itertools.count()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return losses[min(next(calls), len(losses) - 1)](model, batch)

    return loss


def local(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    a, b, scale = model(batch["x"], batch["y"])
    return (scale * a * b).sum(-1).mean()


def narrow(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ml.gather(model(batch["x"], batch["y"])[0][:, :7]).square().mean()


def wide(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ml.gather(model(batch["x"], batch["y"])[0]).square().mean()


def without_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    a = model(batch["x"], batch["y"])[0]
    return ml.gather(a.detach()).square().mean() + a.mean()


def in_checkpoint(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def rows(x: Tensor) -> Tensor:
        return ml.gather(model.a(x)).square()  # type: ignore[operator]

    return checkpoint(rows, batch["x"], use_reentrant=False).mean()  # type: ignore[union-attr]


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].requires_grad_()
    (grad,) = torch.autograd.grad(ml.gather(model.a(x)).sum(), x, create_graph=True)  # type: ignore[operator]
    return grad.square().mean()


REFUSED: dict[str, tuple[Any, str, type[Exception], str]] = {
    "one does not": (
        lambda: counted([whole, local]), "dp=2", JobError,
        "In step 0 replica 0 makes call 1 of meshloom.gather(), and replica 1 ends its forward without it.",
    ),
    "one does less often": (
        lambda: counted([whole, wide]), "dp=2", JobError,
        "In step 0 replica 0 makes call 2 of meshloom.gather(), and replica 1 ends",
    ),
    "the first does not": (
        lambda: counted([local, whole, whole]), "dp=3", JobError,
        "In step 0 replica 1 makes call 1 of meshloom.gather(), and replica 0 ends",
    ),
    "not from the start": (
        lambda: counted([local, local, whole]), "dp=2", JobError,
        "meshloom.gather() is called in step 1, and was not when this loss was first computed",
    ),
    "later not": (
        lambda: counted([wide, wide, wide, local]), "dp=2", JobError,
        "In step 1 replica 0 makes call 1 of meshloom.gather(), and replica 1 ends",
    ),
    "shapes": (
        lambda: counted([wide, narrow]), "dp=2", JobError,
        "Call 1 of meshloom.gather() in step 0 is of float64[4, 16], with a gradient on replica 0, and of float64[4, 7]",
    ),
    "gradients": (
        lambda: counted([wide, without_gradient]), "dp=2", JobError,
        "with a gradient on replica 0, and of float64[4, 16], without a gradient on replica 1",
    ),
    "in a checkpoint": (
        lambda: in_checkpoint, "dp=2", JobError,
        "Call it outside of torch.utils.checkpoint.",
    ),
    "gradients in the loss": (
        lambda: penalty, "dp=2", JobError,
        "takes a gradient itself, through meshloom.gather()",
    ),
    "chunks": (
        lambda: whole, "dp=2,microbatches=2", PlanError,
        "with microbatches=2 they are computed one after another. Use microbatches=1.",
    ),
    "chunks alone": (
        lambda: whole, "dp=1,microbatches=4", PlanError,
        "Use microbatches=1.",
    ),
    "chunks of a pipeline": (
        lambda: whole, "pp=2,microbatches=2", CaptureError,
        "meshloom.gather() joins samples of replicas within the loss, and a program computes one replica's part",
    ),
    "few samples": (
        lambda: whole, "dp=11", PlanError,
        "A batch of 8 samples leaves replica 8 of dp=11 without one",
    ),
    "local steps": (
        lambda: whole, "dp=2,exchange=local_sgd,local_steps=2", PlanError,
        "with exchange=local_sgd they do not.",
    ),
    "workers": (
        lambda: whole, "dp=2,exchange=async", PlanError,
        "with exchange=async workers take none.",
    ),
    **{
        f"a program under {plan}": (
            lambda: whole, plan, CaptureError,
            "meshloom.gather() joins samples of replicas within the loss, and a program computes one replica's part without waiting for others. "
            "Use dp alone, with zero=3",
        )
        for plan in ("dp=2,tp=2", "dp=2,pp=2", "dp=2,recompute=full")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.long
def test_what_cannot_gather_says_so(name: str):
    make, plan, kind, sentence = REFUSED[name]
    options: dict[str, Any] = {} if "async" in plan else {"dtype": torch.float64}
    with (
        pytest.raises(kind, match=re.escape(sentence)),
        ml.Trainer(job_of(make()), plan, devices="simulated", listener=QUIET, **options) as trainer,
    ):
        trainer.fit()


def test_a_short_last_batch_that_leaves_a_replica_without_samples_is_refused():
    with pytest.raises(PlanError, match=r"A batch of 2 samples leaves replica 2 of dp=4 .* drop_last=True"):
        losses_of(job_of(num_items=10), "dp=4")


def test_a_metric_is_refused_before_the_first_step():
    evaluate = ml.Evaluate(data=Pairs, metrics={"pairs": whole}, every=2)
    assert losses_of(job_of(evaluate=evaluate), "dp=1")
    with pytest.raises(
        JobError, match=r"Metric 'pairs': it calls meshloom.gather\(\), and replicas evaluate"
    ):
        losses_of(job_of(evaluate=evaluate), "dp=2")


def test_a_loss_that_is_not_finite_is_located():
    """Which runs the chunk again on its rank alone, with the rows that the others had."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        rows = ml.gather(model.a(batch["x"]))  # type: ignore[operator]
        return torch.log(rows - 100).mean()

    with pytest.raises(ml.MeshloomError, match=r"The loss of step 0 is nan: rank 0, .*"):
        losses_of(job_of(loss), "dp=2")


def refused_on_a_rank(rank_that_does: int) -> str:
    loss = whole if int(os.environ["RANK"]) == rank_that_does else local
    with pytest.raises(JobError) as caught:
        losses_of(job_of(loss), "dp=2", devices="auto")
    return str(caught.value)


@pytest.mark.processes
def test_on_processes_a_rank_that_does_not_gather_is_named_by_all():
    said = on_ranks(refused_on_a_rank, 2, 1, timeout_seconds=40.0)
    assert said[0] == said[1] and "replica 1 makes call 1 of meshloom.gather(), and replica 0 ends" in said[0]
