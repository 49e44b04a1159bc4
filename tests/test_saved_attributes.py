"""Checkpoints hold what forwards leave in attributes for the next step, and a resumed run goes on with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshloom.checkpoint.checkpoint import Checkpoint, find
from meshloom.checkpoint.format import META, meta_text, read_meta
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.replica.attributes import saved_attributes
from meshloom.replica.attributes.carried_tensors import CarriedTensors, LeftValue
from meshloom.replica.attributes.plain_numbers import PlainNumbers
from meshloom.replica.attributes.rows_anew import SavedRows
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
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


@pytest.mark.parametrize(
    ("plan", "kind"), [("dp=1", Keeping), ("dp=2,microbatches=2", KeepingAList), ("dp=3", KeepingAList)]
)
def test_rows_go_on_with_their_own_state_in_other_chunks(plan: str, kind: type[Keeping], tmp_path: Path):
    of = job(kind)
    first = run(of, "dp=2", 2, out=tmp_path)
    # sum order differs: 1 to 4 chunks
    assert first + run(of, plan, 5, resume=tmp_path) == pytest.approx(run(of, "dp=1", 5), rel=1e-12)


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


@pytest.mark.long
def test_a_save_beside_training_holds_what_there_was(tmp_path: Path):
    """The next step writes to the tensor itself while the thread may still be copying."""
    of = dataclasses.replace(job(Counting), checkpoint="background", checkpoint_every=2, keep_checkpoints=2)
    with Trainer(of, "dp=2", devices="simulated", out=tmp_path, dtype=torch.float64, listener=Listener(started=lambda _: None)) as trainer:  # fmt: skip
        trainer.fit()
    again = run(of, "dp=2", 5, resume=tmp_path / "step-00000004")
    assert again == run(of, "dp=2", 5)[4:]


def test_numbers_and_tensors_are_in_the_files(tmp_path: Path):
    run(job(), "dp=2", 2, out=tmp_path)
    saved = Checkpoint.open(tmp_path)
    values = saved.values["attributes"]
    assert values["rows"] == [4, 4]
    assert values["numbers"] == {"1.steps": 2, "3.steps": 2}
    assert [key for key in saved.keys() if key.startswith("carried/1.")] == ["carried/1.state/0/0", "carried/1.state/1/0"]  # noqa: SIM118  # fmt: skip
    assert saved.shape("carried/1.state/1/0") == (4, 7)
    assert json.dumps(values)  # plain


def _nothing_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CarriedTensors, "resume", lambda self, rows, values: None)


def _of_other_chunks(patch: pytest.MonkeyPatch) -> None:
    real = CarriedTensors.left

    def left(self: CarriedTensors) -> Any:
        found = list(real(self))
        return [
            (name, chunk, dataclasses.replace(each, value=each.value + chunk)) for name, chunk, each in found
        ]

    patch.setattr(CarriedTensors, "left", left)


def _rows_in_another_order(patch: pytest.MonkeyPatch) -> None:
    real = saved_attributes.rows_anew

    def rows_anew(saved: Any, sizes: Any) -> list[list[SavedRows]]:
        return [each[::-1] for each in real(saved, sizes)]

    patch.setattr(saved_attributes, "rows_anew", rows_anew)


def _begun_anew_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saved_attributes, "batch_dims", lambda records, rows, step: None)


def _a_number_less(patch: pytest.MonkeyPatch) -> None:
    real = PlainNumbers.resume
    patch.setattr(
        PlainNumbers,
        "resume",
        lambda self, values: real(self, {name: each - 1 for name, each in values.items()}),
    )


def _old_values(patch: pytest.MonkeyPatch) -> None:
    real = CarriedTensors.resume

    def resume(self: CarriedTensors, rows: Any, values: dict[Any, LeftValue]) -> None:
        real(self, rows, {place: dataclasses.replace(each, value=each.value * 0.999) for place, each in values.items()})  # fmt: skip

    patch.setattr(CarriedTensors, "resume", resume)


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (_nothing_resumed, "steps"),
        (_of_other_chunks, "the checkpoint after step 0"),
        (_rows_in_another_order, "under dp=1"),
        (_begun_anew_elsewhere, "under dp=1"),
        (_a_number_less, "steps"),
        (_old_values, "steps"),
    ],
)
@pytest.mark.slow
def test_verify_catches(plant: Callable[[pytest.MonkeyPatch], None], where: str):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        report = verify(job(), Plan.parse("dp=2"), devices="simulated", dtype=torch.float64, quick=False)
    assert report is not None and not report.passed
    wrong = [each.what for each in report.between if not each.passed]
    if where == "steps":
        assert [each.passed for each in report.steps] == [True, False, False]
        assert any("what is resumed is not what was saved" in each.sentence for each in report.causes)
    else:
        assert any(where in what for what in wrong), wrong


@pytest.mark.parametrize(
    ("kind", "plan", "note"),
    [
        (Keeping, "dp=3", ""),
        (KeepingAList, "dp=2,sync_batch_norm=true,microbatches=2", ""),
        (Counting, "dp=2,microbatches=2", "under dp=1 the checkpoint is resumed without what forwards keep in 1.count, 3.count: "),
        (KeepingMeans, "dp=2", "under dp=1 the checkpoint is resumed without what forwards keep in 1.state, 3.state: "),
        (KeepingATuple, "dp=2", "nothing was resumed: a checkpoint does not hold what forwards keep in 1.state, a State"),
        pytest.param(KeepingAList, "dp=2,pp=2,tp=2,microbatches=2", "", marks=pytest.mark.slow),
        pytest.param(Keeping, "tp=2", "", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_verify_resumes_in_the_middle_and_finds_all_equal(kind: type[Keeping], plan: str, note: str):
    """Among evaluations, which leave states and numbers alone."""
    samples = list(normal(6, 5))[:13]
    evaluate = Evaluate(
        data=lambda: samples, metrics={"size": lambda model, x: model(x).square().mean()}, every=1
    )
    report = verify(
        job(kind, evaluate=evaluate),
        Plan.parse(plan),
        devices="simulated",
        dtype=torch.float64,
        quick=False,
    )
    assert report is not None and report.passed, (report.causes, report.between) if report else None
    notes = [each for each in report.notes if "keyed" not in each]
    assert [note in each for each in notes] == ([True] if note else []), notes


class Forever(Keeping):
    """Counts evaluations, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) * (1 + 0.1 * self.steps)


def test_an_evaluation_counts_for_nothing():
    """The trial before the first step moved the counter, and each replica's by its own number of chunks."""
    samples = list(normal(6, 5))[:13]
    evaluate = Evaluate(data=lambda: samples, metrics={"size": lambda model, x: model(x).square().mean()}, every=1)  # fmt: skip
    of = job(Forever)
    with Trainer(dataclasses.replace(of, evaluate=evaluate), "dp=2", devices="simulated", listener=Listener(started=lambda _: None)) as trainer:  # fmt: skip
        losses = [trainer.step(batch) for batch in trainer.batches() if trainer.evaluate()]
        assert [each.model.get_submodule("1").steps for each in trainer.replicas] == [5, 5]
    with Trainer(of, "dp=2", devices="simulated", listener=Listener(started=lambda _: None)) as trainer:
        assert losses == [trainer.step(batch) for batch in trainer.batches()]


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
