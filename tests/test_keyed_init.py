"""`Job(init="keyed")`: each module's convention under a seed of its name, so that a rank makes what it holds alone, and one
device makes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from meshloom import Trainer
from meshloom.asynchronous.state.parameters import Parameters
from meshloom.core.errors import JobError, MeshloomError
from meshloom.core.job import Job
from meshloom.parameters.model import build_model, state_of
from meshloom.parameters.unfilled_model import build_unfilled
from meshloom.parameters.values.initial_values import FromConventions
from meshloom.parameters.values.keyed_init import keyed_values
from meshloom.telemetry.progress import Listener
from tests.jobs import make_job
from tests.test_starting_model import assert_ranks_start_as_one_device

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("silent_export", "dear_memory")


def keyed(model: Callable[[], nn.Module] | None = None, **settings: Any) -> Job:
    job = replace(make_job("gpt", "adamw"), init="keyed", **settings)
    return job if model is None else replace(job, model=model)


def state(job: Job, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return state_of(build_model(job, CPU, dtype))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"])
@pytest.mark.slow
def test_ranks_start_as_one_device(plan: str):
    job = keyed()
    with Trainer(job, plan, devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)


def wide(extra: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = nn.ModuleDict()
        if extra:
            made["extra"] = nn.Linear(70, 70)
        made["one"] = nn.Linear(70, 70)
        made["other"] = nn.Linear(70, 70)
        made["attention"] = nn.MultiheadAttention(70, 7)
        made["tied"] = nn.Linear(70, 70, bias=False)
        made["tied"].weight = made["one"].weight
        made.register_buffer("noise", torch.randn(70, 3) @ torch.rand(3, 70))
        return made

    return build


@pytest.mark.long
def test_values_depend_on_seed_and_name_alone():
    values = state(keyed(wide()))
    longer = state(keyed(wide(extra=True)))
    parameters = [name for name in values if name != "noise"]
    assert all(torch.equal(longer[name], values[name]) for name in parameters)
    assert not torch.equal(longer["extra.weight"], longer["other.weight"])
    elsewhere = state(keyed(wide(), seed=1))
    drawn = [name for name in values if len(values[name].unique()) > 1]
    assert len(drawn) == 8 and not any(torch.equal(values[name], elsewhere[name]) for name in drawn)
    stream = state(replace(keyed(wide()), init="stream"))
    assert not any(torch.equal(values[name], stream[name]) for name in drawn)
    assert float(values["one.weight"].detach().std()) == pytest.approx(
        float(stream["one.weight"].detach().std()), rel=0.05
    )


def test_a_rank_makes_one_module_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Of two ranks the one makes the slices that it keeps, with one device's bits."""
    made: list[str] = []
    of_module = FromConventions._of_module

    def noted(self: FromConventions, path: str) -> dict[str, Tensor]:
        made.append(path)
        return of_module(self, path)

    model, unfilled, note = build_unfilled(keyed(wide()), CPU, torch.float64)
    assert unfilled is not None and note is None
    unfilled.values = keyed_values(keyed(wide()), unfilled.had, unfilled.lacking)
    assert not unfilled.values.is_built
    whole = state(keyed(wide()))
    monkeypatch.setattr(FromConventions, "_of_module", noted)
    slices = torch.empty(100, dtype=torch.float64)
    unfilled.fill_slices([("one.bias", 10, 70, slices[:60])], state_of(model).keys())
    unfilled.give_values()
    assert torch.equal(slices[:60], whole["one.bias"][10:].double()) and made == ["one"]


class Scaled(nn.Module):
    """Its root gives its modules their values, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(40, 50)
        self.scale = nn.Parameter(torch.empty(50))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Scaled):
            nn.init.ones_(module.scale)


def test_the_model_gives_its_modules_their_values():
    values = state(keyed(Scaled))
    assert float(values["up.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)
    assert values["scale"].eq(1).all() and values["up.bias"].std() > 0  # of Linear's own


def test_generators_and_other_tensors():
    def build() -> nn.Module:
        made = nn.Linear(5, 5)
        made.table = torch.randn(7)
        return made

    one, other = (build_model(keyed(build), CPU, None) for _ in range(2))
    assert torch.equal(one.table, other.table) and float(one.table.std()) > 0.1  # pyright: ignore[reportArgumentType, reportCallIssue]
    drawn = []
    for job in (keyed(wide()), keyed(wide(extra=True))):
        build_model(job, CPU, None)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]


def reads_draws() -> nn.Module:
    made = nn.Linear(3, 3)
    if made.weight.sum() > 0:
        made.bias.data.zero_()
    return made


def reads_constants() -> nn.Module:
    made = nn.Linear(3, 3)
    vars(made)["rate"] = torch.linspace(0, 0.5, 3)[2].item()
    return made


def bare() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.Module())
    made[1].gain = nn.Parameter(torch.ones(3))
    return made


def kept_copy() -> nn.Module:
    made = nn.Linear(3, 3)
    made.register_buffer("before", made.weight.detach().clone())
    return made


def test_what_has_no_convention_is_refused_by_name():
    assert build_model(keyed(reads_constants), CPU, None).rate == 0.5
    for build, why in (
        (reads_draws, "model function needs them.*Leave init out"),
        (bare, "1.gain of Module has no convention.*_init_weights.*Write one"),
        (lambda: weight_norm(nn.Linear(3, 3)), r"weight.original0 of .*has no convention"),
        (kept_copy, "the buffer before is computed from values of parameters"),
    ):
        with pytest.raises(JobError, match=why):
            build_model(keyed(build), CPU, None)
    with pytest.raises(MeshloomError, match="1.gain of Module has no convention"):
        Trainer(keyed(bare), "dp=2,zero=3", devices="simulated")


def test_servers_start_from_the_same_values():
    job = keyed()
    expected = state(job)
    server = Parameters(job, 1, 2, whole=False, device=CPU, dtype=None, content=None)
    assert all(torch.equal(each, expected[name]) for name, each in server.model.named_parameters())


@pytest.mark.long
def test_a_checkpoint_goes_on(tmp_path: Path):
    quiet = Listener(lambda text: None, note=lambda text: None)
    settings: Any = {"devices": "simulated", "listener": quiet}
    with Trainer(keyed(steps=2), "dp=2", **settings) as trainer:
        trainer.fit()
        expected = {name: each.clone() for name, each in state_of(trainer.replicas[0].model).items()}
    with Trainer(keyed(steps=1), "dp=2", out=tmp_path, **settings) as trainer:
        trainer.fit()
    with Trainer(keyed(steps=2), "dp=2", resume=tmp_path, **settings) as trainer:
        trainer.fit()
        for name, each in state_of(trainer.replicas[0].model).items():
            assert torch.equal(each, expected[name])
