"""`Job(init="keyed")`: draws are keyed by the names of tensors, so that a rank draws what it holds alone, and one
device draws the same."""

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
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.parameters.model import build_model, state_of
from meshloom.parameters.unfilled_model import build_unfilled
from meshloom.telemetry.progress import Listener
from tests.families import FAMILIES, Family
from tests.families import family as family_module
from tests.jobs import make_job
from tests.test_starting_model import assert_ranks_start_as_one_device

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("silent_export", "dear_memory")


def keyed(model: Callable[[], nn.Module] | None = None, **settings: Any) -> Job:
    job = replace(make_job("gpt", "adamw"), init="keyed", **settings)
    return job if model is None else replace(job, model=model)


def state(job: Job, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return state_of(build_model(job, CPU, dtype))


@pytest.mark.parametrize(
    "plan",
    ["dp=2", "dp=2,zero=3"]
    + [
        pytest.param(each, marks=marks)
        for each, marks in (
            ("tp=2", pytest.mark.long),
            ("pp=2,microbatches=2", pytest.mark.long),
            ("dp=2,pp=2,tp=2", pytest.mark.slow),
        )
    ],
)
@pytest.mark.slow
def test_ranks_start_as_one_device(plan: str):
    job = keyed()
    with Trainer(job, plan, devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)


def wide(extra: bool = False, draws: int = 1) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = nn.ModuleDict()
        if extra:
            made["extra"] = nn.Linear(70, 70)
        made["one"] = nn.Linear(70, 70)
        made["other"] = weight_norm(nn.Linear(70, 70))
        for _ in range(draws):
            nn.init.normal_(made.get_parameter("one.weight"), std=0.02)
        made["tied"] = nn.Linear(70, 70, bias=False)
        made["tied"].weight = made["one"].weight
        made.register_buffer("noise", torch.randn(70, 3) @ torch.rand(3, 70))
        return made

    return build


@pytest.mark.long
def test_a_tensor_is_drawn_without_the_others():
    model, unfilled, note = build_unfilled(keyed(wide()), CPU, None)
    assert unfilled is not None and note is None
    whole = state(keyed(wide()))
    slices = torch.empty(100)
    unfilled.fill_slices([("one.bias", 0, 70, slices[:70])], state_of(model).keys())
    assert torch.equal(slices[:70], whole["one.bias"])
    assert unfilled.num_drawn == 70


@pytest.mark.long
def test_values_depend_on_seed_and_name_alone():
    values = state(keyed(wide()))
    longer = state(keyed(wide(extra=True)))
    assert all(torch.equal(longer[name], each) for name, each in values.items())
    assert not torch.equal(longer["extra.weight"], longer["other.parametrizations.weight.original1"])
    elsewhere = state(keyed(wide(), seed=1))
    drawn = [name for name, each in values.items() if len(each.unique()) > 1]
    assert len(drawn) == 6 and not any(torch.equal(values[name], elsewhere[name]) for name in drawn)
    assert float(values["one.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    stream = state(replace(keyed(wide()), init="stream"))
    assert not any(torch.equal(values[name], stream[name]) for name in drawn)


@pytest.mark.long
def test_what_is_computed_from_a_drawn_tensor_fits_it():
    """Also in another dtype, to which it is converted afterwards."""
    for dtype in (None, torch.float64):
        values = state(keyed(wide()), dtype)
        norm, direction = (values[f"other.parametrizations.weight.original{number}"] for number in (0, 1))
        assert torch.allclose(direction.norm(dim=1, keepdim=True), norm)
    model, unfilled, _ = build_unfilled(keyed(wide()), CPU, torch.float64)
    assert unfilled is not None
    unfilled.fill()
    assert all(torch.equal(each, values[name]) for name, each in state_of(model).items())


@pytest.mark.long
def test_other_tensors_and_generators():
    def build() -> nn.Module:
        made = nn.Linear(5, 5)
        made.table = torch.randn(7)
        nn.init.normal_(made.bias, generator=torch.Generator().manual_seed(3))
        return made

    one, other = (build_model(keyed(build), CPU, None) for _ in range(2))
    assert torch.equal(one.table, other.table) and float(one.table.std()) > 0.1  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert torch.equal(one.bias, torch.empty(5).normal_(generator=torch.Generator().manual_seed(3)))  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_the_generator_is_left_where_it_was_before_the_construction():
    drawn = []
    for job in (keyed(wide()), keyed(wide(draws=5))):
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


def cannot_be_recorded() -> nn.Module:
    made = nn.Linear(3, 3)
    made.register_buffer("count", torch.zeros(3).resize_(2))
    return made


@pytest.mark.long
def test_what_cannot_be_keyed_is_refused():
    assert build_model(keyed(reads_constants), CPU, None).rate == 0.5
    for build, why in (
        (reads_draws, "reads values that it has drawn"),
        (cannot_be_recorded, "cannot be recorded"),
    ):
        job = keyed(build)
        with pytest.raises(JobError, match=f"{why}.*Leave init out"):
            build_model(job, CPU, None)
        with pytest.raises(JobError, match=f"{why}.*Leave init out"):
            build_unfilled(job, CPU, None)
    with pytest.raises(JobError, match="'stream' or 'keyed'"):
        replace(keyed(), init="named")


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


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ("lstm", "u_net") else pytest.mark.slow)
        for each in FAMILIES.values()
    ],
)
@pytest.mark.long
def test_families_can_be_keyed(family: Family, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(family_module, "_fill", lambda model: None)  # it reads what was drawn
    job = replace(family.make_job(False), init="keyed")
    one, other = state(job), state(job)
    model, unfilled, _ = build_unfilled(job, CPU, None)
    assert unfilled is not None
    unfilled.fill()
    for name, each in state_of(model).items():
        assert torch.equal(each, one[name]) and torch.equal(each, other[name])
