"""Checkpoints hold what forwards leave in attributes for the next step, and a resumed run goes on with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshloom.checkpoint.checkpoint import Checkpoint, find
from meshloom.checkpoint.format import META, meta_text, read_meta
from meshloom.core.job import Job
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.zoo import job_of, normal, sgd

pytestmark = pytest.mark.usefixtures("silent_export")


class State(NamedTuple):
    h: Tensor


class Keeping(nn.Module):
    """x [n, 7] -> [n, 7], with half of what the rows before had, scaled by the number of steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.state: Any = None
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        out = h if self.state is None else h + 0.5 * self.before()
        if self.training:
            self.state = self.kept(h.detach())
            self.steps += 1
        return out * (1 + 0.1 * self.steps)

    def before(self) -> Tensor:
        return self.state

    def kept(self, h: Tensor) -> Any:
        return h


class KeepingAList(Keeping):
    """Of the last two states, transposed."""

    def before(self) -> Tensor:
        return torch.stack([each.T for each in self.state]).sum(0)

    def kept(self, h: Tensor) -> Any:
        return [*(self.state or []), h.T.contiguous()][-2:]


class KeepingMeans(Keeping):
    """Which belong to no row."""

    def kept(self, h: Tensor) -> Any:
        return h.mean(0)


class KeepingATuple(Keeping):
    """With names, which no file has."""

    def before(self) -> Tensor:
        return self.state.h

    def kept(self, h: Tensor) -> Any:
        return State(h)


class Counting(Keeping):
    """In place, in a tensor that the constructor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.ones(())

    def kept(self, h: Tensor) -> Any:
        self.count += 1
        return h * self.count


def job(kind: type[Keeping] = Keeping, **settings: Any) -> Job:
    """Of five steps; two modules keep something, and stages of a pipeline one each."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), kind(), nn.Linear(7, 7), kind(), nn.Linear(7, 3))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    more = {"optimizer": sgd, "shuffle": False, "steps": 5, **settings}
    return job_of(model, loss, list(normal(6, 5)), **more)


def run(
    of: Job, plan: str, steps: int, *, out: Path | None = None, resume: Path | None = None, notes: list[str] | None = None
) -> list[float]:  # fmt: skip
    """To so many steps in all, in float64; the losses. Saves after the last one."""
    listener = Listener(started=lambda text: None, note=(notes if notes is not None else []).append)
    with Trainer(
        dataclasses.replace(of, steps=steps), plan, devices="simulated", out=out, resume=resume, dtype=torch.float64, listener=listener
    ) as trainer:  # fmt: skip
        losses = [trainer.step(batch) for batch in trainer.batches()]
        if out:
            trainer.save()
    return losses


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("dp=2,microbatches=2", KeepingAList),
        ("dp=3,zero=3", Counting),
        *(
            pytest.param(plan, kind, marks=pytest.mark.slow)
            for plan, kind in (
                ("dp=1", KeepingMeans), ("dp=2,zero=1", Keeping), ("dp=2,zero=2", KeepingAList), ("tp=2", Counting),
                ("pp=2,microbatches=2", KeepingAList), ("pp=2,microbatches=4,virtual_stages=2,schedule=interleaved", Keeping),
                ("dp=2,pp=2,tp=2,microbatches=2", Keeping), ("dp=2,zero=3,tp=2", KeepingAList),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_run_that_is_resumed_twice_is_one_that_was_not_interrupted(
    plan: str, kind: type[Keeping], tmp_path: Path
):
    """The second checkpoint is of ranks that have resumed what the module of another stage has left."""
    of, a, b = job(kind), tmp_path / "a", tmp_path / "b"
    parts = [
        run(of, plan, 2, out=a),
        run(of, plan, 3, out=b, resume=a),
        run(of, plan, 5, resume=b),
    ]
    assert [loss for part in parts for loss in part] == run(of, plan, 5)


@pytest.mark.parametrize(("kind", "batch"), [(KeepingMeans, 8), (Keeping, 7), (KeepingATuple, 8)])
def test_what_is_in_doubt_begins_with_nothing_and_is_named(kind: type[Keeping], batch: int, tmp_path: Path):
    """A state of seven rows and seven numbers each; means, which have no rows; names, which no file has."""
    of, notes = job(kind, batch_size=batch), list[str]()
    run(of, "dp=1", 2, out=tmp_path, notes=notes)
    listener = Listener(started=lambda text: None, note=notes.append)
    with Trainer(of, "dp=2", devices="simulated", resume=tmp_path, dtype=torch.float64, listener=listener) as trainer:  # fmt: skip
        found = [list(each.scope.carried.left()) for each in trainer.replicas]
        assert [each.model.get_submodule("1").steps for each in trainer.replicas] == [2, 2]
    said = [each for each in notes if "1.state, 3.state" in each]
    if kind is KeepingATuple:
        assert found == [[], []]
        assert said == [
            "Checkpoints leave out what forwards keep in 1.state, 3.state: a State. A resumed run begins there as the model is built. Keep dense tensors, and "
            "tuples and lists of them."
        ]
    else:
        assert found == [[], []]
        sizes = "2 chunks of 4 rows now and had 1 chunk of 8 rows" if batch == 8 else "2 chunks of 3 to 4 rows now and had 1 chunk of 7 rows"  # fmt: skip
        assert said == [
            f"A step has {sizes} when {find(tmp_path)} was saved. 1.state, 3.state begin without what forwards had left there, as no dimension is certainly "
            "that of the batch. Resume with as many chunks of the same sizes to go on with it."
        ]


def test_a_checkpoint_of_an_older_version_is_resumed_and_what_it_lacks_is_said(tmp_path: Path):
    of, notes = job(), list[str]()
    run(of, "dp=1", 2, out=tmp_path)
    path = find(tmp_path)
    body = read_meta(path)
    assert body is not None
    del body["values"]["attributes"]
    (path / META).write_text(meta_text(body))
    assert len(run(of, "dp=1", 3, resume=tmp_path, notes=notes)) == 1
    assert [each for each in notes if "attributes" in each] == [
        f"{path} does not hold what forwards leave in attributes (1.state, 3.state, 1.steps and 1 more): they begin as the model is built."
    ]


def test_numbers_and_tensors_are_in_the_files(tmp_path: Path):
    run(job(), "dp=2", 2, out=tmp_path)
    saved = Checkpoint.open(tmp_path)
    values = saved.values["attributes"]
    assert values["rows"] == [4, 4]
    assert values["numbers"] == {"1.steps": 2, "3.steps": 2}
    assert [key for key in saved.keys() if key.startswith("carried/1.")] == ["carried/1.state/0/0", "carried/1.state/1/0"]  # noqa: SIM118  # fmt: skip
    assert saved.shape("carried/1.state/1/0") == (4, 7)
    assert json.dumps(values)  # plain


@pytest.mark.parametrize("saves", [True, False])
def test_an_asynchronous_run_names_what_its_checkpoints_leave_out(tmp_path: Path, saves: bool) -> None:
    notes: list[str] = []
    listener = Listener(started=lambda _: None, note=notes.append)
    out = tmp_path if saves else None
    with Trainer(job(steps=2), "dp=2,exchange=async", devices="simulated", out=out, listener=listener) as trainer:  # fmt: skip
        trainer.fit()
    named = [
        note
        for note in notes
        if "do not hold what forwards leave in attributes (1.state, 3.state, 1.steps" in note
    ]
    assert len(named) == saves, notes
