"""`ml.Metric`: a metric of all samples together has one value under every plan, however they are divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.losses.all_samples import checked_samples, computed
from meshloom.replica import metrics
from meshloom.verify.findings import lines_of
from tests.verified import equals_one_device, report_on

PLANS = ("dp=1", "dp=2", "dp=4,microbatches=2", "dp=2,zero=3")


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Half of them right of a line."""

    def __init__(self, num: int, first: int = 0) -> None:
        self.num, self.first = num, first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(self.first + index))
        return x, int(x[0] + x[3] > 0)


def predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]).argmax(1), batch[1]


def f1(ours: Tensor, right: Tensor) -> Tensor:
    return 2 * (ours & right).sum() / (ours.sum() + right.sum()).clamp(min=1)


def scores(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"scores": model(batch[0]), "right": batch[1]}


def in_order(scores: Tensor, right: Tensor) -> Tensor:
    """Another number for any other order of samples."""
    return (scores[:, 0].diff() * right[1:]).sum()


def some_of_each() -> dict[str, Any]:
    import torchmetrics  # takes seconds

    return {
        "f1": ml.Metric(predicted, f1),
        "order": ml.Metric(scores, in_order),
        "torch": ml.Metric(predicted, torchmetrics.F1Score(task="binary")),
        "accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean(),
    }


def job(num: int = 21, size: int | None = None, **own: Any) -> ml.Job:
    measured = own or some_of_each()
    return ml.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)).double(),
        loss=lambda model, batch: F.cross_entropy(model(batch[0].double()), batch[1]),
        data=lambda: Points(24),
        batch_size=8,
        steps=3,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-2),
        evaluate=ml.Evaluate(lambda: Points(num, 500), {name: in_double(each) for name, each in measured.items()}, 3, batch_size=size),
    )  # fmt: skip


def in_double(metric: Any) -> Any:
    def of(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda model, batch: function(model, (batch[0].double(), batch[1]))

    return ml.Metric(of(metric.update), metric.compute) if isinstance(metric, ml.Metric) else of(metric)


def evaluated(given: ml.Job, plan: str) -> tuple[dict[str, float], list[str]]:
    said: list[str] = []
    listener = ml.Listener(started=lambda text: None, note=said.append)
    with ml.Trainer(given, plan, devices="simulated", listener=listener) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        return trainer.evaluate(), said


def plain(given: ml.Job) -> dict[str, float]:
    """One forward of all samples, in a loop of one's own."""
    with ml.Trainer(
        given, "dp=1", devices="simulated", listener=ml.Listener(started=lambda text: None)
    ) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        model = trainer.replicas[0].model.eval()
    assert given.evaluate is not None
    data = given.evaluate.data()
    batch = (
        torch.stack([data[index][0] for index in range(len(data))]).double(),
        torch.tensor([data[index][1] for index in range(len(data))]),
    )
    with torch.no_grad():
        ours, right = predicted(model, batch)
        return {
            "f1": float(f1(ours, right)), "order": float(in_order(**scores(model, batch))), "torch": float(f1(ours, right)),
            "accuracy": float((ours == right).float().mean()),
        }  # fmt: skip


def check(given: ml.Job, *plans: str) -> None:
    right = plain(given)
    for plan in plans:
        found, said = evaluated(given, plan)
        assert not any("metric" in each.lower() for each in said)
        for name, value in found.items():  # sums within a forward have other orders
            assert math.isclose(value, right[name], rel_tol=1e-6, abs_tol=1e-12), (plan, name, value, right)


@pytest.mark.parametrize(("num", "size"), [(21, None), (21, 5), (1, None)])
@pytest.mark.long
def test_every_plan_has_the_value_of_one_forward(num: int, size: int | None):
    check(job(num, size), *PLANS)  # of 1 sample most replicas have none


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,pp=2,microbatches=2"])
@pytest.mark.long
def test_so_have_plans_that_read_it(plan: str):
    check(job(order=ml.Metric(scores, in_order)), plan)


@pytest.mark.long
def test_verification_computes_it_by_itself():
    equals_one_device(job(), "dp=4", quick=False, steps=3)


@pytest.mark.parametrize("planted", ["order", "twice", "one rank"])
@pytest.mark.long
def test_samples_that_are_not_gathered_rightly_differ_from_one_device(
    planted: str, monkeypatch: pytest.MonkeyPatch
):
    right = metrics.gather_objects

    def wrong(group: Any, value: Any, destination: int = 0) -> Any:
        everyone = right(group, value, destination)
        if planted == "order":
            return [[(batch, -chunk, whole) for batch, chunk, whole in each] for each in everyone]
        return [*everyone, *everyone[:1]] if planted == "twice" else everyone[:1]

    monkeypatch.setattr(metrics, "gather_objects", wrong)
    given = job(order=ml.Metric(scores, in_order))
    report = report_on(given, "dp=2", quick=False, steps=3)
    assert not report.passed
    assert lines_of(report)[0].startswith("DIFFERS: the evaluation after step 0")


def test_best_patience_and_schedules_go_by_it(tmp_path: Path):
    given = job(f1=ml.Metric(predicted, lambda ours, right: torch.tensor(0.5)))
    assert given.evaluate is not None
    seen: list[float] = []

    def of(value: float) -> float:
        seen.append(value)
        return value

    falls = ml.ByMetric(
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        "f1",
        of,
    )
    evaluate = replace(given.evaluate, best="f1:max", every=1, patience=1, scheduler=falls)
    given = replace(given, evaluate=evaluate)
    with ml.Trainer(
        given, "dp=2", devices="simulated", out=tmp_path, listener=ml.Listener(started=lambda text: None)
    ) as trainer:
        summary = trainer.fit()
        assert [each.updater.learning_rates() for each in trainer.replicas] == [[0.015], [0.015]]
    assert summary.steps == 2 and summary.evaluation == {"f1": 0.5} and set(seen) == {0.5}
    assert [each.name for each in (tmp_path / "best").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("update", "compute", "words"),
    [
        (lambda m, b: (m(b[0]).argmax(1) == b[1]).double().mean(), float, r"update returned a tensor of shape \[\] for a chunk of 4 samples\. Return a"),
        (lambda m, b: (b[1], m(b[0])[:3]), f1, r"update returned a tensor of shape \[3, 2\] for a chunk of 4 samples"),
        (lambda m, b: {"p": b[1], "n": 3}, f1, r"update returned a int in a dict\. Return"),
        (lambda m, b: (), f1, r"update returned an empty tuple"),
        (predicted, lambda whole: 0.0, r"compute is called with \(2 tensors\), as update returns: too many positional arguments"),
        (scores, f1, r"compute is called with \(scores=\.\.\., right=\.\.\.\), as update returns: "),
        (predicted, lambda ours, right: ours, r"compute returned a Tensor of shape \[8\], not one number"),
        (predicted, lambda ours, right: {"f1": 1.0}, r"compute returned a dict, not one number"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_before_the_first_step(update: Any, compute: Any, words: str):
    given = job(mine=ml.Metric(update, compute))
    with ml.Trainer(
        given, "dp=2", devices="simulated", listener=ml.Listener(started=lambda text: None)
    ) as trainer:
        with pytest.raises(ml.MeshloomError, match=rf"^Metric 'mine': {words}"):
            next(iter(trainer.batches()))
        assert trainer.next_step == 0


@pytest.mark.long
def test_what_compute_cannot_do_with_one_batch_is_a_note_and_with_all_an_error():
    """An area under a curve is not defined for one class, which a first batch may have alone."""

    def needs_all(ours: Tensor, right: Tensor) -> float:
        if len(right) < 21:
            raise ValueError("Only one class present.")
        return 0.25

    found, said = evaluated(job(auc=ml.Metric(predicted, needs_all)), "dp=2")
    assert found == {"auc": 0.25}
    assert [each for each in said if "auc" in each] == [
        "Metric 'auc', tried on a part of the data: compute failed with ValueError: Only one class present. Evaluations call it with all samples."
    ]
    with pytest.raises(
        ml.MeshloomError, match="Metric 'auc': compute failed with ValueError: Only one class"
    ):
        evaluated(job(20, auc=ml.Metric(predicted, needs_all)), "dp=2")


def test_chunks_that_do_not_fit_together_are_named():
    metric = ml.Metric(lambda model, batch: batch, lambda whole: 0.0)
    with pytest.raises(
        ml.MeshloomError,
        match=r"shape \[2, 5\] for one chunk and \[3, 7\] for another\. Only the number of samples may differ: pad",
    ):
        computed(metric, [torch.zeros(2, 5), torch.zeros(3, 7)])
    with pytest.raises(
        ml.MeshloomError, match="update returned a dict of p, y for one chunk and 1 tensor for another"
    ):
        computed(metric, [{"p": torch.zeros(1), "y": torch.zeros(1)}, torch.zeros(1)])


def test_what_is_kept_of_a_chunk_is_no_view_of_more():
    logits = torch.zeros(3, 1000, 7)
    kept = checked_samples((logits[:, -1],), 3)
    assert checked_samples(logits.bfloat16(), 3).dtype == torch.float32  # pyright: ignore[reportAttributeAccessIssue]  # numpy has no bfloat16
    assert isinstance(kept, tuple) and kept[0].untyped_storage().nbytes() == kept[0].nbytes


def test_it_takes_functions():
    with pytest.raises(ml.MeshloomError, match=r"Metric\(compute=\.\.\.\) must be a function, not str\."):
        ml.Metric(predicted, "f1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ml.MeshloomError,
        match=r"Metric\(update=\.\.\.\) is called with \(model, batch\), and this function takes \(batch\)\.",
    ):
        ml.Metric(lambda batch: batch, f1)  # pyright: ignore[reportArgumentType, reportUnknownLambdaType]
