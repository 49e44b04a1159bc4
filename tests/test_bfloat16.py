"""precision=bf16: under every plan what one device computes that updates float32 copies of its bfloat16 parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshloom.core.errors import JobError, PlanError
from meshloom.core.job import Evaluate, Job
from meshloom.core.moments import bfloat16_products
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.data.samples import first_batches
from meshloom.optimizer.bfloat16.lowered import lowered
from meshloom.optimizer.masters import Masters
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.capture import capture
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.precision_jobs import job_of
from tests.test_memory import job_and_batches
from tests.verified import equals_one_device, report_on

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "compiler")]


def bf16(plan: str) -> Plan:
    return Plan.parse(f"{plan},precision=bf16")


def masters_after(job: Job, plan: str, **settings: Any) -> dict[str, Tensor]:
    """What `full_state` gives after training: masters and buffers."""
    with Trainer(job, bf16(plan), devices="simulated", cache="off", **settings) as trainer:
        trainer.fit()
        return {name: each.clone() for name, each in trainer.together(full_state)[0].items()}


def test_one_device_is_the_loop_that_people_write():
    job = job_of("mlp", shuffle=False, clip_grad_norm=None)
    seed_everything(model_seed(job.seed))
    model = job.model()
    masters = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    model.to(torch.bfloat16)
    optimizer: Any = job.optimizer([(str(number), each) for number, each in enumerate(masters)])
    for batch in first_batches(job, 2):
        batch["x"] = batch["x"].to(torch.bfloat16)
        loss: Any = job.loss(model, batch)
        loss.backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        model.zero_grad()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.data.copy_(master)
    ours = masters_after(job, "dp=1", steps=2)
    assert [*ours] == [name for name, _ in model.named_parameters()]
    for (name, one), expected in zip(ours.items(), masters, strict=True):
        assert torch.equal(one, expected), name


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("dp=2,zero=1", "dp=2,zero=3"),
        slow("dp=2,zero=3", "dp=2"),
        slow("dp=2", "dp=2,zero=2"),
        slow("pp=2,microbatches=4", "pp=2,microbatches=4,schedule=interleaved,virtual_stages=2"),
        slow("dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3"),
    ],
)
def test_a_resumed_run_goes_on_with_the_same_bits(saved: str, resumed: str, tmp_path: Path):
    # under tp zero=3 adds up the norm that clips in another order
    job = job_of("mlp", steps=4, checkpoint_every=2, clip_grad_norm=None if "tp" in saved else 1.0)
    whole = masters_after(job, saved, out=tmp_path)
    half = tmp_path / "step-00000002"
    again = masters_after(job, resumed, resume=half)
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert {each.dtype for each in load_file(half / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("saved", "plan"),
    [
        ("dp=2,zero=1", "dp=1"),
        slow("dp=2,tp=2,zero=1", "dp=1"),
        slow("dp=2,tp=2,zero=1", "dp=2,zero=3"),
        slow("dp=2,zero=3", "tp=2"),
        slow("tp=2", "pp=2,microbatches=2"),
    ],
)
def test_a_checkpoint_has_the_masters_under_every_plan(saved: str, plan: str, tmp_path: Path):
    job = job_of("cnn")
    masters = masters_after(job, saved, out=tmp_path)
    with Trainer(job, bf16(plan), devices="simulated", cache="off", resume=tmp_path, steps=4) as trainer:
        loaded = trainer.together(full_state)[0]
        for replica in trainer.replicas:
            found = replica.masters
            assert found and found.wrong() is None
        assert all(torch.equal(loaded[name], masters[name]) for name in masters)
    weights = load_file(next(tmp_path.glob("step-*")) / "model.safetensors")
    for name, each in weights.items():  # the file loads where the weights are wanted alone
        expected = masters[name].to(each.dtype) if each.is_floating_point() else masters[name]
        assert torch.equal(each, expected)


@pytest.mark.slow
def test_each_rank_has_masters_of_what_it_updates_alone():
    counted: dict[str, list[int]] = {}
    for plan in ("dp=2", "dp=2,zero=1", "dp=2,zero=3"):
        with Trainer(job_of("mlp"), bf16(plan), devices="simulated", cache="off") as trainer:
            found = [replica.masters for replica in trainer.replicas]
            counted[plan] = [sum(one.data().nbytes for one, _ in each.copies()) for each in found if each]
            total = 4 * trainer.replicas[0].num_trainable
    assert counted["dp=2"] == [total, total]
    for plan in ("dp=2,zero=1", "dp=2,zero=3"):
        assert sum(counted[plan]) == total and max(counted[plan]) < 0.51 * total


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,microbatches=2,zero=1",
        slow("dp=2,zero=3"),
        slow("pp=2,microbatches=3,schedule=zb-v"),
        slow("dp=2,pp=2,tp=2,microbatches=2,zero=1"),
    ],
)
def test_bytes_are_as_predicted_and_half(plan: str):
    counted: list[float] = []
    for precision in ("float32", "bf16"):
        job = job_of("mlp", drop_last=True)
        job = replace(job, evaluate=Evaluate(job.data, {"loss": job.loss}, every=2))
        with Trainer(job, f"{plan},precision={precision}", devices="simulated", cache="off") as trainer:
            summary = trainer.fit()
            held = sum(each.numel() for _, each in trainer.replicas[0].named)
        assert summary.predicted == summary.counted
        # which parameters a rank holds depends on what activations weigh
        counted.append(summary.counted.total("dp") / held if "dp" in plan else summary.counted.total("pp"))
    assert counted[1] < 0.62 * counted[0]  # sums of losses are float64


@pytest.mark.parametrize("model", ["mlp", slow("gpt")])
def test_memory_of_a_step_is_predicted(model: str):
    job, batches = job_and_batches(model, "adamw")
    job = lowered(job, Plan(precision="bf16"))
    predicted = predict_memory(capture(job, (batches[0], batches[1])), job.optimizer)
    measured = measure_memory(job, batches[:1])
    assert (predicted.parameters, predicted.optimizer, predicted.gradients) == (
        measured.parameters, measured.optimizer, measured.gradients,
    )  # fmt: skip
    assert predicted.optimizer >= 6 * predicted.parameters  # a master and two averages in float32
    for phase, most in predicted.peaks.items():
        assert most == pytest.approx(measured.peaks[phase], rel=0.02)


class _Mixed(nn.Module):
    """Parameters of every dtype, frozen and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.precise = nn.Parameter(torch.full((5,), 1 / 3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.float16))
        self.turn = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.register_buffer("steps", torch.tensor(3))
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(5))
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.norm(self.again(x))) * self.precise * self.narrow + self.frozen * self.scale
        return x * self.turn.abs().to(x.dtype)


@pytest.mark.slow
def test_parameters_of_every_dtype_are_trained():
    job = replace(job_of("mlp"), model=_Mixed)
    equals_one_device(job, bf16("dp=2,zero=1"), dtype=None)
    with Trainer(job, bf16("dp=2,zero=1"), devices="simulated") as trainer:
        replica = trainer.replicas[0]
        state = replica.model.state_dict()
        found = replica.masters
        assert found
        masters = {each.name: each.data().dtype for each, _ in found.copies()}
    assert {name: each.dtype for name, each in state.items() if each.dtype != torch.bfloat16} == {
        "turn": torch.complex64, "steps": torch.int64, "norm.num_batches_tracked": torch.int64,
        **{f"norm.{name}": torch.float32 for name in ("weight", "bias", "running_mean", "running_var")},
    }  # fmt: skip
    assert masters.get("precise", torch.float64) == torch.float64
    assert not masters.keys() & {"turn", "frozen", "norm.weight"}


@pytest.mark.parametrize("plan", ["dp=2,zero=1", slow("tp=2"), slow("dp=2,zero=3")])
def test_weights_of_files_fill_masters_at_their_precision(plan: str, tmp_path: Path):
    job = job_of("mlp")
    model = job.model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with Trainer(replace(job, weights=tmp_path), bf16(plan), devices="simulated") as trainer:
        masters = trainer.together(full_state)[0]
    assert all(torch.equal(masters[name], each) for name, each in model.state_dict().items())


@pytest.mark.slow
def test_verify_says_what_is_rounded_and_that_float64_leaves_it_out():
    job = job_of("mlp", shuffle=False)
    report = equals_one_device(job, bf16("dp=2"), steps=1, dtype=None)
    assert "parameters are bfloat16" in report.autocast
    exact = equals_one_device(job, bf16("dp=2"), steps=1)
    assert "left out" in exact.autocast


def lost_update(masters: Masters, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """The masters of one parameter keep their values."""
    return [
        None if master.name == "third.weight" else each
        for master, each in zip(masters.owned, gradients, strict=True)
    ]


@pytest.mark.parametrize("plan", ["dp=2,zero=1", slow("dp=2"), slow("tp=2"), slow("pp=2,microbatches=2")])
def test_a_master_that_is_not_updated_is_found(plan: str, monkeypatch: pytest.MonkeyPatch):
    right = Masters.raised
    monkeypatch.setattr(
        Masters, "raised", lambda masters, gradients: lost_update(masters, right(masters, gradients))
    )
    _found(plan, "third.weight")


@pytest.mark.parametrize("plan", ["dp=2", slow("dp=2,zero=1"), slow("dp=2,zero=3"), slow("pp=2,dp=2,microbatches=2")])  # fmt: skip
def test_a_parameter_that_is_not_rewritten_on_one_rank_is_found(plan: str, monkeypatch: pytest.MonkeyPatch):
    publish, seen = Masters.publish, list[int]()

    def on_others(self: Masters) -> None:
        if id(self) not in seen:
            seen.append(id(self))
        if seen.index(id(self)) != 1:
            publish(self)

    monkeypatch.setattr(Masters, "publish", on_others)
    _found(plan, "")


@pytest.mark.parametrize("plan", ["dp=2,zero=1", slow("dp=1"), slow("tp=2"), slow("dp=2,zero=3")])
def test_a_slice_that_is_rounded_twice_is_found(plan: str, monkeypatch: pytest.MonkeyPatch):
    publish = Masters.publish

    def rounds_masters(self: Masters) -> None:
        for master, slice_ in [*self.copies()][:1]:
            master.data().copy_(master.data().to(slice_.parameter.dtype))
        publish(self)

    monkeypatch.setattr(Masters, "publish", rounds_masters)
    _found(plan, "")


def _found(plan: str, name: str) -> None:
    report = report_on(job_of("mlp"), bf16(plan), dtype=None)
    assert not report.passed
    wrong = [error.name for step in report.steps for error in step.errors if not error.passed]
    facts = [fact for step in report.steps for fact in step.facts]
    assert name in wrong if name else wrong or facts


def test_what_masters_cannot_follow_is_refused():
    class Table(nn.Module):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(29, 6, **settings), nn.Linear(6, 29)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    job = job_of("gpt")
    tables = ({"sparse": True}, "dp=2", "sparse gradients"), ({"max_norm": 1.0}, "dp=1", "max_norm, by which")
    for settings, plan, said in tables:
        with pytest.raises(JobError, match=f"embed.weight has {said}"):
            Trainer(replace(job, model=lambda s=settings: Table(**s)), bf16(plan), devices="simulated")
    lbfgs = job_of("mlp", optimizer=lambda named: torch.optim.LBFGS([each for _, each in named]))
    with pytest.raises(JobError, match="LBFGS evaluates the loss several times in a step"):
        Trainer(lbfgs, bf16("dp=1"), devices="simulated")
    with pytest.raises(PlanError, match="precision=bf16 updates .* exchange=diloco"):
        bf16("dp=2,exchange=diloco")


class Unlike(nn.Linear):
    """Its values depend on how many were built."""

    built = 0

    def __init__(self) -> None:
        super().__init__(7, 5)
        Unlike.built += 1
        with torch.no_grad():
            self.bias.fill_(Unlike.built)


def test_a_model_that_is_another_one_each_time_is_refused():
    job = replace(job_of("mlp"), model=Unlike)
    with pytest.raises(JobError, match="bias has other values on rank 1 than on rank 0"):
        Trainer(job, bf16("dp=2"), devices="simulated")


def notes_of(plan: str, devices: str = "simulated") -> Sequence[str]:
    notes: list[str] = []
    listener = Listener(started=lambda text: None, note=notes.append)
    with Trainer(job_of("mlp"), plan, devices=devices, listener=listener):
        return [note for note in notes if "emulates" in note]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_emulated_products_are_said_once(precision: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bfloat16_products, "has_bfloat16_products", lambda: False)
    (note,) = notes_of(f"dp=2,precision={precision}")
    assert note.startswith(
        f"precision={precision}: this processor has no instructions for products in bfloat16"
    )
    monkeypatch.setattr(bfloat16_products, "has_bfloat16_products", lambda: True)
    assert not notes_of(f"dp=2,precision={precision}")


def test_nothing_is_said_of_emulation_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bfloat16_products, "has_bfloat16_products", lambda: False)
    assert not notes_of("dp=2")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not bfloat16_products.emulation_note("bf16", [gpu, gpu])
    assert bfloat16_products.emulation_note("bf16", [gpu, cpu])
