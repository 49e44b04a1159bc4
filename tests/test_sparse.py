"""Embeddings with sparse gradients under every plan: one device's numbers, whatever travels; refused by name where
they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, SparseAdam

from meshloom.core.errors import JobError, TrainingError
from meshloom.core.job import Job
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET, Listener
from meshloom.train.trainer import Trainer

# torch's, of its own Adagrad and SparseAdam
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

# 300 rows of which a step uses at most 20, 9 rows of which it uses most.
SIZES = {"rows": 300, "most": 9}
PLANS = [
    "dp=1,microbatches=2",
    "dp=2",
    "dp=3,microbatches=2",
    "dp=2,zero=1",
    "dp=3,exchange=server,servers=2",
    "dp=2,exchange=server,servers=1",
    "dp=3,exchange=ring",
    "dp=2,zero=3,microbatches=2",
]
TOLERANCE: Any = {"rtol": 1e-11, "atol": 1e-13}  # float64, another order of sums


class Words(nn.Module):
    """Two tables of odd widths, one for bags; `silent` rows give a gradient of zeros, `never` is not used."""

    def __init__(self, num_rows: int, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, 5, sparse=sparse)
        self.bags = nn.EmbeddingBag(num_rows, 3, mode="mean", sparse=sparse)
        self.never = nn.Embedding(4, 2, sparse=sparse)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        # of a third of the rows the gradient is 0, and yet they are used
        looked_up = self.table(x) * (x % 3 != 0)[..., None]
        return self.last(torch.tanh(torch.cat([looked_up.mean(1), self.bags(x)], dim=1)))


def sparse_adam(named: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    return [
        SparseAdam([each for name, each in named if not name.startswith("last")], lr=0.05),
        AdamW([each for name, each in named if name.startswith("last")], lr=0.05),
    ]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SparseAdam": sparse_adam,
    "SGD": lambda named: SGD([each for _, each in named], lr=0.5),
    "momentum": lambda named: SGD([each for _, each in named], lr=0.5, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda named: Adagrad([each for _, each in named], lr=0.1),
    "AdamW": lambda named: AdamW([each for _, each in named], lr=0.05),
}


def samples_of(num_rows: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randint(0, num_rows, (4,), generator=generator),
            "y": torch.randint(0, 3, (), generator=generator),
        }
        for _ in range(count)
    ]


def job(optimizer: str, size: str = "rows", **more: Any) -> Job:
    samples = samples_of(SIZES[size], 23)
    return Job(
        model=lambda: Words(SIZES[size]),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=OPTIMIZERS[optimizer],
        data=lambda: samples,
        # the last batch of an epoch has 3 samples: with dp=3,microbatches=2 some chunks have none
        **{"batch_size": 5, "steps": 9, **more},
    )


def trained(the_job: Job, plan: str, **more: Any) -> tuple[dict[str, Tensor], Any]:
    """Parameters after all steps in float64, and the summary."""
    with Trainer(the_job, plan, devices="simulated", dtype=torch.float64, listener=QUIET, **more) as trainer:
        summary = trainer.fit()
        return {name: each.clone().cpu() for name, each in trainer.together(full_state)[0].items()}, summary


@cache
def one_device(
    optimizer: str, size: str = "rows", steps: int = 9, clip_grad_norm: float | None = None
) -> dict[str, Tensor]:
    """A plain loop over the same batches, each of them one chunk. Adam and its like cannot take sparse
    gradients: they get dense ones."""
    the_job = job(optimizer, size, steps=steps, clip_grad_norm=clip_grad_norm)
    with Trainer(the_job, "dp=1", devices="simulated", dtype=torch.float64, listener=QUIET) as trainer:
        model = Words(the_job.model().table.num_embeddings).double()  # type: ignore[attr-defined]
        model.load_state_dict(trainer.replicas[0].model.state_dict())
        batches = [batch.shares[0][0].data for batch in _read(trainer)]
    made = the_job.optimizer(list(model.named_parameters()))
    for batch in batches:
        model.zero_grad()
        the_job.loss(model, batch).backward()  # type: ignore[union-attr]
        if optimizer not in ("SparseAdam", "SGD", "Adagrad"):
            for each in model.parameters():
                each.grad = None if each.grad is None else each.grad.to_dense()
        if clip_grad_norm is not None:
            present = [each for each in model.parameters() if each.grad is not None]
            norm = torch.stack([each.grad.to_dense().norm() for each in present]).norm()  # type: ignore[union-attr]
            for each in present:
                each.grad = each.grad * (clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # type: ignore[operator]
        for each in made if isinstance(made, list) else [made]:
            each.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def _read(trainer: Trainer) -> list[Any]:
    found: list[Any] = []
    for batch in trainer.batches():
        found.append(batch)
        trainer.synchronous.next_step = batch.step + 1  # type: ignore[union-attr]
    return found


@pytest.mark.covering(
    "SparseAdam-rows", "SGD-rows-dp=2,zero=3", "SGD-most-dp=2,zero=1", "Adagrad-most-dp=3,exchange=server"
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("optimizer", ["SparseAdam", "SGD", "Adagrad"])
@pytest.mark.long
def test_a_sparse_step_is_one_device_s(optimizer: str, size: str, plan: str) -> None:
    """Under dp they ended in "Cannot access storage of SparseTensorImpl", and SparseAdam was refused.
    Clipping counts each row once."""
    the_job = job(optimizer, size, clip_grad_norm=0.3)
    found, summary = trained(the_job, plan)
    expected = one_device(optimizer, size, clip_grad_norm=0.3)
    for name, each in expected.items():
        torch.testing.assert_close(
            found[name], each, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert summary.predicted == summary.counted
    assert torch.equal(
        found["never.weight"], one_device(optimizer, size, steps=1, clip_grad_norm=0.3)["never.weight"]
    )


@pytest.mark.slow
def test_rows_and_not_the_table_travel_along_dp() -> None:
    """300 rows of 5 and of 3 elements, of which a replica uses at most 12."""
    _, summary = trained(job("SGD", steps=2), "dp=2,tp=2")
    _, dense = trained(replace(job("SGD", steps=2), model=lambda: Words(300, sparse=False)), "dp=2,tp=2")
    assert summary.predicted == summary.counted
    assert 2 * sum(summary.counted.bytes["dp"].values()) < sum(dense.counted.bytes["dp"].values())


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.slow
def test_optimizers_that_move_all_rows_get_the_same_numbers_dense(optimizer: str) -> None:
    the_job = job(optimizer)
    expected = one_device(optimizer)
    for plan in ("dp=3", "dp=2,zero=1", "dp=2,zero=3"):
        found, _ = trained(the_job, plan)
        for name, each in expected.items():
            torch.testing.assert_close(
                found[name], each, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.slow
def test_what_is_not_possible_is_refused_by_name() -> None:
    with pytest.raises(
        JobError,
        match="SparseAdam needs sparse gradients, and gradients are dense in messages of exchange=async",
    ):
        trained(job("SparseAdam"), "dp=2,exchange=async")

    class Tied(Words):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.table(x).mean(1), self.table.weight[:3]) + 0 * self.last.weight.sum()

    for plan in ("dp=2", "dp=2,zero=3", "tp=2"):
        with pytest.raises(
            TrainingError,
            match=r"The gradient of table\.weight is dense, and its optimizer \(SparseAdam\) takes sparse ones only",
        ):
            trained(replace(job("SparseAdam"), model=lambda: Tied(300)), plan)


@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adagrad"])
@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(optimizer: str, tmp_path: Path) -> None:
    the_job = job(optimizer)
    expected = one_device(optimizer)
    trained(replace(the_job, steps=4), "dp=2,zero=1", out=tmp_path)
    trained(replace(the_job, steps=7), "dp=2,zero=3", out=tmp_path / "next", resume=tmp_path)
    found, _ = trained(the_job, "dp=2", resume=tmp_path / "next")
    for name, each in expected.items():
        torch.testing.assert_close(
            found[name], each, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_run_says_that_its_bytes_depend_on_the_rows() -> None:
    notes: list[str] = []
    with Trainer(
        job("SparseAdam"),
        "dp=2",
        devices="simulated",
        listener=Listener(started=lambda text: None, note=notes.append),
    ):
        pass
    assert any("send the rows that a step uses" in note and "at most" in note for note in notes), notes
