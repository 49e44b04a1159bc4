"""Trained parameters that a forward or a loss writes: what every forward leaves alike is one device's; the rest is refused
by name before the first step, with the reason. Tables with `max_norm` that functions look up are one device's under every
plan (docs/buffers.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from meshloom.core.errors import MeshloomError
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.program.capture.writing_code import may_write
from meshloom.verify.run import verify
from tests.covering import few
from tests.zoo import integers, job_of, normal

DATA = {"x": normal(1, 7), "y": integers(2, 5)}
PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"]


class Masked(nn.Module):
    """A layer between two others whose weight it writes before it reads it."""

    def __init__(self, write: Callable[[nn.Linear, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(9, 9), write
        self.register_buffer("mask", (torch.arange(81).reshape(9, 9) % 3 > 0).float())
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.linear, self.mask)
        return self.linear(x)


class Between(nn.Module):
    def __init__(self, write: Callable[[nn.Linear, Tensor], None]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 9), Masked(write), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def multiplied(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data *= mask


def assigned(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data = linear.weight.data * mask


@torch.no_grad()
def copied(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.copy_(linear.weight * mask)


def clamped(linear: nn.Linear, mask: Tensor) -> None:
    for each in linear.parameters():
        each.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamped_at_once(linear: nn.Linear, mask: Tensor) -> None:
    torch._foreach_clamp_max_([linear.weight, linear.bias], 0.1)  # pyright: ignore[reportPrivateUsage]


@torch.no_grad()
def limited(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.renorm_(2, 0, 0.5)


def filled(linear: nn.Linear, mask: Tensor) -> None:
    nn.init.constant_(linear.bias, 0.25)


def normalised(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data = F.normalize(linear.weight.data, dim=1)


def drawn(linear: nn.Linear, mask: Tensor) -> None:
    nn.init.normal_(linear.bias)


def shrunk(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight.data.mul_(0.9)


def made_anew(linear: nn.Linear, mask: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * mask)


def once(linear: Any, mask: Tensor) -> None:
    if not hasattr(linear, "is_begun"):
        linear.is_begun = True
        linear.bias.data.fill_(0.3)


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def written_last(model: Any, batch: Any) -> Tensor:
    found = loss(model, batch)
    multiplied(model.b.linear, model.b.mask)
    return found


def nothing(linear: nn.Linear, mask: Tensor) -> None:
    pass


def between(write: Callable[[nn.Linear, Tensor], None], loss: Any = loss) -> Job:
    return job_of(partial(Between, write), loss, DATA)


def check(job: Job, plan: str, *, quick: bool = True) -> None:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64, quick=quick)
    assert report is not None
    assert report.passed, str(report)


SETTLED = [clamped_at_once, multiplied, assigned, copied, clamped, normalised, limited, filled]


@pytest.mark.parametrize(
    "plan", few(["dp=2,zero=3", "dp=2", "dp=2,zero=1", "dp=2,zero=2"], 1, pytest.mark.slow)
)
@pytest.mark.parametrize("write", few(SETTLED, 1, pytest.mark.slow))
@pytest.mark.long
def test_what_every_forward_leaves_alike_is_one_device_s(write: Any, plan: str) -> None:
    check(between(write), plan)


@pytest.mark.long
@pytest.mark.parametrize("plan", few(["pp=2,microbatches=2", "tp=2", "dp=2,pp=2,tp=2"], 1, pytest.mark.slow))
@pytest.mark.parametrize("write", few(SETTLED, 1, pytest.mark.slow))
@pytest.mark.slow
def test_in_programs_the_module_that_writes_runs_as_written(write: Any, plan: str) -> None:
    """Writes of a list of tensors ended in a traceback with two microbatches, as the second one's came before the first
    one's backward."""
    check(between(write), plan)


REFUSED = [
    (drawn, "b.linear.bias, which is trained, and what is written depends on the batch or on random draws"),
    (shrunk, "b.linear.weight, which is trained, and each forward changes it further"),
    (made_anew, "b.linear.weight, which is trained, and another parameter is put in its place"),
    (once, "b.linear.bias, which is trained, and not every forward writes it alike"),
]


@pytest.mark.parametrize("plan", few(["dp=2", *PLANS[1:]], 1, pytest.mark.slow))
@pytest.mark.parametrize(("write", "why"), REFUSED)
@pytest.mark.long
def test_what_would_not_be_one_device_s_is_refused_with_the_reason(write: Any, why: str, plan: str) -> None:
    with pytest.raises(MeshloomError, match=why):
        check(between(write), plan)


@pytest.mark.long
def test_a_write_after_the_weight_was_read_is_refused() -> None:
    with pytest.raises(
        MeshloomError, match="b.linear.weight, which is trained, and it is written after it has been read"
    ):
        check(between(nothing, written_last), "dp=2")


def test_code_that_writes_nothing_is_not_tried() -> None:
    assert not may_write(loss, Between(nothing))
    assert may_write(loss, Between(copied))
    assert may_write(written_last, Between(nothing))


IDS = {"x": integers(3, 11, 4), "y": integers(2, 5)}


class Table(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.out, self.kind = nn.Parameter(torch.randn(11, 7)), nn.Linear(7, 5), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bag":
            return self.out(F.embedding_bag(x, self.weight, max_norm=1.0, mode="mean"))
        if self.kind == "padding":
            found = F.embedding(x, self.weight, 0, 1.0, 1.0, scale_grad_by_freq=True)
        else:
            found = F.embedding(x, self.weight, max_norm=1.0)
        return self.out(found.mean(1))


class Scaled(nn.Module):
    def __init__(self, _: str) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 7, max_norm=1.0), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1))


class Last(Dataset[dict[str, Tensor]]):
    """Samples of ids that no step has."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([7, 8, 9, 10]) - index % 2, "y": torch.tensor(index % 5)}


class Tied(nn.Module):
    def __init__(self, is_module: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, max_norm=1.0 if is_module else None)
        self.is_module = is_module

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x) if self.is_module else F.embedding(x, self.table.weight, max_norm=1.0)
        return F.linear(found.mean(1), self.table.weight)


@pytest.mark.parametrize("plan", few(PLANS, 1, pytest.mark.slow))
@pytest.mark.parametrize("kind", few(["plain", "bag", "padding"], 1, pytest.mark.slow))
@pytest.mark.long
def test_tables_that_functions_limit_are_one_device_s(kind: str, plan: str) -> None:
    before = F.embedding
    check(job_of(partial(Table, kind), loss, IDS), plan)
    assert F.embedding is before


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
@pytest.mark.long
def test_replicas_add_up_a_row_in_one_order(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds up for itself, and a GPU adds scattered values in any order: replicas drifted apart there."""

    def scattered(*given: Any) -> Any:
        raise AssertionError("added up by index")

    monkeypatch.setattr(Tensor, "index_add_", scattered)
    check(job_of(partial(Table, "plain"), loss, IDS), plan)


@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.slow
def test_an_evaluation_scales_no_rows_on_one_device_either(kind: str) -> None:
    """Its rows are others than those of a step; torch would leave them scaled."""
    model = partial(Scaled if kind == "module" else Table, "plain")
    job = job_of(model, loss, {"x": integers(3, 6, 4), "y": integers(2, 5)})
    evaluated = Evaluate(data=lambda: Last(4), metrics={"loss": loss}, every=1)
    check(replace(job, evaluate=evaluated), "dp=2", quick=False)


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.long
def test_a_limited_table_that_an_output_layer_reads_too_is_refused(is_module: bool) -> None:
    """Its rows are scaled or not there, as the batch has it."""
    with pytest.raises(
        MeshloomError, match="The table table.weight has max_norm, and the loss reads it besides"
    ):
        check(job_of(partial(Tied, is_module), loss, IDS), "dp=2")
