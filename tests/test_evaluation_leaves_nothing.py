"""Training goes on after an evaluation as if there had been none, whatever its forwards write."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.replica.model_state import ModelState
from tests.covering import slow
from tests.fitted import fitted
from tests.jobs import class_loss, vectors
from tests.verified import equals_one_device, report_on


class Counting(nn.Module):
    """A layer whose forward goes by how many rows it has seen, in training or not. how: where it counts."""

    seen: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.n, self.rows, self.sums = how, 0, list[float](), {"all": 0.0}
        self.left: Tensor | None = None
        self.register_buffer("seen", torch.zeros(()))
        self.linear = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        of_attributes = self.n + sum(self.rows) + self.sums["all"]
        y = self.linear(x) * (
            1 + 0.01 * (self.seen + of_attributes + (0 if self.left is None else self.left))
        )
        if self.how == "in place":
            self.seen += len(x)
        elif self.how == "uncounted":
            self.seen.data += len(x)
        elif self.how == "replaced":
            self.seen = self.seen + len(x)
        elif self.how == "number":
            self.n += len(x)
        elif self.how == "list":
            self.rows.append(float(len(x)))
        elif self.how == "dict":
            self.sums["all"] += len(x)
        else:
            self.left = torch.tensor(float(len(x))) + (0 if self.left is None else self.left)
        return y


# how it counts -> what is said to be written
NAMES = {
    "in place": "seen",
    "uncounted": "seen",
    "replaced": "seen",
    "number": "n",
    "list": "rows",
    "dict": "sums",
    "tensor": "left",
}


def job(how: str) -> ml.Job:
    return ml.Job(
        model=lambda: Counting(how), loss=class_loss, data=vectors, batch_size=12, steps=4, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        evaluate=ml.Evaluate(lambda: vectors(10), {"loss": class_loss, "again": lambda model, batch: class_loss(model, batch)}, 2),
    )  # fmt: skip


def trained(how: str, plan: str, *, evaluates: bool) -> tuple[list[float], list[dict[str, float]], list[str]]:
    said, losses, metrics = list[str](), list[float](), list[dict[str, float]]()
    listener = ml.Listener(started=lambda text: None, note=said.append)
    given = job(how)
    if not evaluates:
        given = ml.Job(
            **{
                name: getattr(given, name)
                for name in ("model", "loss", "data", "batch_size", "steps", "optimizer")
            }
        )
    with ml.Trainer(given, plan, devices="simulated", listener=listener) as trainer:
        for batch in trainer.batches():
            losses.append(trainer.step(batch))
            metrics += [trainer.evaluate()] if evaluates else []
    return losses, metrics, [each for each in said if each.startswith("Metrics write")]


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.long
def test_losses_are_those_of_a_run_that_does_not_evaluate(how: str):
    for plan in ("dp=1", "dp=2"):
        right, _, silent = trained(how, plan, evaluates=False)
        losses, metrics, said = trained(how, plan, evaluates=True)
        assert losses == right and not silent, plan
        assert all(each["loss"] == each["again"] for each in metrics)  # both found what training has left
        told = [
            f"Metrics write {NAMES[how]}, which is put back after each of them: training goes on as without an evaluation (docs/contract.md)."
        ]
        assert said == told


@pytest.mark.parametrize("plan", ["tp=2", *(slow(each) for each in ("pp=2,microbatches=2", "dp=2,zero=3"))])
@pytest.mark.long
def test_so_are_they_under_other_plans(plan: str):
    right, _, _ = trained("in place", plan, evaluates=False)
    losses, _, said = trained("in place", plan, evaluates=True)
    assert losses == right and len(said) == 1


def test_asynchronous_runs_say_so_too():
    said: list[str] = []
    listener = ml.Listener(started=lambda text: None, note=said.append)
    fitted(job("in place"), "dp=2,exchange=async", listener=listener)
    assert sum(each.startswith("Metrics write seen") for each in said) == 1


@pytest.mark.long
def test_verification_sees_what_is_not_put_back(monkeypatch: pytest.MonkeyPatch):
    report = equals_one_device(job("in place"), "dp=2", quick=False, steps=3)
    monkeypatch.setattr(ModelState, "put_back", lambda self: None)
    monkeypatch.setattr(ModelState, "end", lambda self: None)
    report = report_on(job("in place"), "dp=2", quick=False, steps=3)
    assert not report.passed


def test_a_metric_that_toggles_modes_does_so_for_itself():
    modes: list[bool] = []

    def sampled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        modes.append(model.training)
        model.train()
        return class_loss(model, batch)

    given = job("in place")
    given = ml.Job(
        model=lambda: nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 5)), loss=class_loss, data=vectors, batch_size=12, steps=1, optimizer=given.optimizer,
        evaluate=ml.Evaluate(lambda: vectors(10), {"one": sampled, "two": sampled}, 1),
    )  # fmt: skip
    with ml.Trainer(
        given,
        "dp=2",
        devices="simulated",
        listener=ml.Listener(started=lambda text: None, note=lambda text: None),
    ) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        before = {name: each.clone() for name, each in trainer.replicas[0].model.named_buffers()}
        trainer.evaluate()
        assert not any(modes) and len(modes) == 8  # two metrics of a chunk of each replica, twice
        for name, each in trainer.replicas[0].model.named_buffers():  # batch norm in training mode writes
            assert torch.equal(each, before[name])


def scripted() -> nn.Module:
    """Of modules in TorchScript, whose tensors lie in no dict: a class of it, and a norm whose statistics metrics write in training mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and used

        class Cell(torch.jit.ScriptModule):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(5, 7) * 0.3)

            @torch.jit.script_method
            def forward(self, x: Tensor) -> Tensor:
                return x @ self.weight.t()

        return nn.Sequential(Cell(), torch.jit.script(nn.BatchNorm1d(5)))


@pytest.mark.slow
def test_modules_in_torchscript_are_put_back_too():
    def sampled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return class_loss(model.train(), batch)

    given = replace(job("in place"), model=scripted, evaluate=ml.Evaluate(lambda: vectors(10), {"loss": sampled}, 2))  # fmt: skip
    equals_one_device(given, "dp=2,zero=3", quick=False, steps=3)


def test_what_is_built_once_stays_built():
    class Pool:
        pass

    module = nn.Linear(2, 2)
    vars(module).update(
        pool=None, table=[1.0, 2.0], shared=(torch.ones(2), {"a": torch.zeros(1)}), cells=[torch.ones(1)]
    )
    table, cell = vars(module)["table"], vars(module)["cells"][0]
    state = ModelState(module, written := set())
    vars(module).update(pool=Pool(), cache=torch.ones(3), late=Pool(), table=[5.0])
    table.append(3.0)
    cell.add_(1)
    vars(module)["cells"].clear()
    vars(module)["shared"][1]["a"].data.add_(1)
    module.register_buffer("extra", torch.ones(1))
    state.put_back()
    state.end()
    assert isinstance(vars(module)["pool"], Pool) and isinstance(vars(module)["late"], Pool)
    assert "cache" not in vars(module) and not dict(module.named_buffers())
    assert vars(module)["table"] is table and table == [1.0, 2.0]
    assert vars(module)["cells"][0] is cell and cell == 1 and vars(module)["shared"][1]["a"] == 0
    assert written == {"cache", "table", "cells", "shared", "extra"}
