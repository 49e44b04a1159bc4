"""Losses that cannot be read run whole on every rank of a replica (docs/opaque.md)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import meshloom as ml
from meshloom.planner.advise import advise
from meshloom.planner.describe import describe
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.pricing import Devices
from meshloom.planner.readings import Readings
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET
from meshloom.verify.run import verify
from tests.processes import on_ranks
from tests.rehearsals import machine
from tests.zoo import integers, job_of, normal

pytestmark = pytest.mark.usefixtures("silent_export")
TOLERANCE = 1e-10  # float64; sums over chunks in other orders


class Cut(nn.Module):
    """A number that Python draws is where its input is cut; statistics are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        at = int(random.random() * 6) if self.training else 3
        x = torch.cat([x[:, at:], x[:, :at]], 1)
        return self.two(self.drop(torch.tanh(self.norm(self.one(x)))))


def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def data() -> list[dict[str, Tensor]]:
    x, y = normal(1, 7).double(), integers(2, 5)
    return [{"x": x[row], "y": y[row]} for row in range(len(x))]


def job(**settings: Any) -> ml.Job:
    evaluate = ml.Evaluate(data=data, metrics={"loss": loss}, every=2)
    return job_of(lambda: Cut().double(), loss, data(), evaluate=evaluate, clip_grad_norm=0.5, **settings)


def trained(plan: str, **settings: Any) -> tuple[list[float], dict[str, Tensor], dict[str, float], bool]:
    """Losses, state and metrics, and whether the bytes that were predicted were sent."""
    with ml.Trainer(job(), plan, devices="simulated", listener=QUIET, **settings) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
        state = trainer.together(full_state)[0]
        found = trainer.evaluate()
        summary = trainer.summary(1.0, {}, None)
        return losses, state, found, summary.predicted == summary.counted


@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "dp=2,pp=2,tp=2",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("pp=2,microbatches=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3", "dp=2,pp=2,schedule=zb-h1,microbatches=2")
        ),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_it_equals_one_device_and_is_said(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(job(), ml.Plan.parse(plan), devices="simulated", steps=2)
    assert report is not None
    assert report.passed, report.causes
    assert "The loss cannot be read, so it runs as written, whole, on every rank" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_training_and_evaluation_are_those_of_dp_alone() -> None:
    losses, state, metrics, _ = trained("dp=2")
    ours, held, found, as_predicted = trained("dp=2,pp=2,tp=2")
    assert ours == pytest.approx(losses, rel=TOLERANCE)
    assert found == pytest.approx(metrics, rel=TOLERANCE)
    assert all(torch.allclose(held[name], each, rtol=TOLERANCE) for name, each in state.items())
    assert as_predicted


@pytest.mark.long
def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    _, state, _, _ = trained("dp=1")
    with ml.Trainer(job(), "tp=2,pp=2", devices="simulated", listener=QUIET, out=tmp_path) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            if batch.step == 1:
                trainer.save()
                break
    _, held, _, _ = trained("dp=1", resume=tmp_path)
    assert all(torch.allclose(held[name], each, rtol=TOLERANCE) for name, each in state.items())


@pytest.mark.slow
@pytest.mark.long
def test_what_only_a_program_can_do_is_refused() -> None:
    for asked, what in (
        ("tp=2,recompute=full", "recompute runs operators of the loss a second time"),
        ("tp=2,tp_placements=one:column", "tp_placements says how operators of the loss are sharded"),
        ("pp=2,cuts=norm", "cuts says between which modules the loss is cut"),
    ):
        with pytest.raises(
            ml.MeshloomError, match=f"^{what}.*cannot be read. Without it the loss runs whole"
        ):
            ml.Trainer(job(), asked, devices="simulated", listener=QUIET)
        with pytest.raises(ml.MeshloomError, match=f"^{what}"):
            Readings(job()).runs(ml.Plan.parse(asked), 4)
    with pytest.raises(ml.MeshloomError, match=r"Without it the module runs as it is"):
        ml.Trainer(job(), "dp=2,recompute=full", devices="simulated", listener=QUIET)


@pytest.mark.long
def test_rules_for_operators_do_no_harm() -> None:
    losses, _, _, _ = trained("dp=1")
    with ml.Trainer(
        job(rules={"zoo::nothing": "b i -> b i"}), "tp=2", devices="simulated", listener=QUIET
    ) as trainer:
        assert [trainer.step(batch) for batch in trainer.batches()] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.slow
def test_it_is_compiled_where_the_plan_asks_for_it() -> None:
    losses, state, _, _ = trained("dp=1,compile=true")
    ours, held, _, _ = trained("tp=2,compile=true")
    assert ours == pytest.approx(losses, rel=TOLERANCE)
    assert all(torch.allclose(held[name], each, rtol=TOLERANCE) for name, each in state.items())


@pytest.mark.long
def test_describe_counts_it_while_it_runs_once() -> None:
    found = describe(Readings(job()))
    model, batch = Cut().double(), default_collate(data()[:8])
    with FlopCounterMode(display=False) as counter:
        loss(model, batch).backward()
    assert found.whole.flops + found.whole.backward_flops == counter.get_total_flops()
    assert found.whole.parameters == sum(each.numel() for each in model.parameters())
    assert found.opaque[0].startswith("The loss cannot be read, so it runs as written, whole")
    measured = measure_memory(job(), [batch])
    assert found.memory is not None
    assert (found.memory.parameters, found.memory.gradients, found.memory.optimizer) == (
        measured.parameters,
        measured.gradients,
        measured.optimizer,
    )
    assert found.memory.kept == pytest.approx(measured.kept, rel=0.1)  # results that nothing keeps


@pytest.mark.slow
@pytest.mark.long
def test_what_ranks_run_is_known_before() -> None:
    """For the loss, for an optimizer that looks at all parameters, and for hooks that no program has."""
    plan = ml.Plan.parse("dp=2,pp=2,tp=2")
    runs, notes = Readings(job()).runs(plan, 4)
    assert str(runs) == "dp=2" and "tp=2 and pp=2 divide nothing" in notes[0]
    as_read = replace(job(), model=lambda: nn.Sequential(nn.Linear(7, 5)).double())
    assert Readings(as_read).runs(plan, 4) == (plan, [])
    closures = replace(as_read, optimizer=lambda named: torch.optim.LBFGS([each for _, each in named]))
    assert "LBFGS looks at all parameters" in Readings(closures).runs(plan, 4)[1][0]
    runs, notes = Readings(closures).runs(ml.Plan.parse("dp=2,zero=1"), 4)
    assert str(runs) == "dp=2" and "zero=1 divides nothing" in notes[0]

    def hooked() -> nn.Module:
        model = as_read.model()
        next(model.parameters()).register_hook(lambda gradient: 0.5 * gradient)
        return model

    runs, notes = Readings(replace(as_read, model=hooked)).runs(plan, 4)
    assert str(runs) == "dp=2" and "hook" in notes[0]


@pytest.mark.slow
@pytest.mark.long
def test_advice_prefers_replicas() -> None:
    here = Devices(num_ranks=2, machine=machine(), threads_of=lambda ranks: 1, common_memory=True)
    found = advise(job(), here)
    assert found.recommended is not None and not found.recommended.whole
    whole = [each for each in found.options if each.whole]
    assert {str(each.plan).split(",microbatches")[0] for each in whole} == {"dp=1,tp=2", "dp=1,pp=2"}
    assert all("the loss runs whole: each of the 2 ranks of a replica" in each.why for each in whole)
    assert "The loss cannot be read" in found.whole[0]
    assert "use dp=2 instead" in advise(job(), here, plans=[ml.Plan.parse("tp=2")]).reason


def on_a_rank(plan: str, out: str) -> tuple[list[float], bool]:
    with ml.Trainer(job(), plan, share=True, listener=QUIET, out=Path(out)) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
        summary = trainer.summary(1.0, {}, None)
        trainer.save()
        return losses, summary.predicted == summary.counted


@pytest.mark.processes
def test_processes_run_it_and_save(tmp_path: Path) -> None:
    expected, state, _, _ = trained("dp=2")
    for losses, as_predicted in on_ranks(on_a_rank, 4, "dp=2,tp=2", str(tmp_path)):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert as_predicted
    with ml.Trainer(job(steps=4), "dp=1", devices="simulated", listener=QUIET, resume=tmp_path) as trainer:
        held = trainer.together(full_state)[0]
    assert all(torch.allclose(held[name], each, rtol=TOLERANCE) for name, each in state.items())
