"""What ranks hold before the first step: one device's values, of which each rank takes what it holds of a model that it
builds in its turn."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshloom import Trainer
from meshloom.comm.pieces import take
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.exchange.zero_three import ZeroThree
from meshloom.parameters import starting_model
from meshloom.parameters.model import build_model, state_of
from meshloom.parameters.unfilled_model import UnfilledModel
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.traffic import Traffic
from tests.families import FAMILIES, Family
from tests.jobs import make_job
from tests.processes import on_ranks

CPU = torch.device("cpu")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def assert_ranks_start_as_one_device(trainer: Trainer, job: Job) -> None:
    """Bit for bit, each rank what it holds; all of the model is held."""
    whole, held = state_of(build_model(job, CPU, None)), set[str]()
    elements = 0  # of slices
    for replica in trainer.replicas:
        exchange = replica.exchange
        sliced = exchange.each_slice(borrowed=True) if isinstance(exchange, ZeroThree) else ()
        for each in sliced:
            pieces = replica.shards.pieces.get(each.name)
            mine = take(pieces, replica.shards.rank, whole[each.name]) if pieces else whole[each.name]
            assert torch.equal(each.data().cpu(), mine.reshape(-1)[each.start : each.stop]), each.name
            elements += each.stop - each.start
        for name, each in state_of(replica.model).items():
            if each.is_meta or (isinstance(exchange, ZeroThree) and exchange.keeps(each)):
                assert each.is_meta or each.untyped_storage().nbytes() == each.element_size()
                continue
            pieces = replica.shards.pieces.get(name)
            expected = take(pieces, replica.shards.rank, whole[name]) if pieces else whole[name]
            assert torch.equal(each.cpu(), expected), name
            held.add(name)
        held |= {each.name for each in sliced}
    assert held == whole.keys()
    if trainer.plan.tp * trainer.plan.pp == 1:
        assert elements in (0, sum(each.numel() for each in whole.values() if isinstance(each, nn.Parameter)))


@pytest.mark.covering("gpt-tp=2", "gpt-dp=3,zero=3")
@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "dp=3,zero=3",
        "dp=2,tp=2,zero=3",
        pytest.param("dp=2,pp=2,microbatches=2,zero=3", marks=pytest.mark.slow),
        pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow),
        "dp=2,pp=2,tp=2,microbatches=2,zero=1",
    ],
)
@pytest.mark.parametrize("model", ["gpt", pytest.param("cnn", marks=pytest.mark.slow)])
def test_ranks_take_what_they_hold_and_nothing_is_sent(plan: str, model: str):
    job = make_job(model, "adamw")
    with Trainer(job, plan, devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)
        assert all(replica.copied == Traffic() for replica in trainer.replicas)
        for replica in trainer.replicas if "zero=1" not in plan else ():  # else they lie in buckets
            sizes = {
                id(each): each.untyped_storage().nbytes()
                for each in replica.model.parameters()
                if not each.is_meta
            }
            full = sum(each.nbytes for each in build_model(job, CPU, None).parameters())
            assert (
                sum(sizes.values()) < (0.95 if "pp=" in plan else 0.8) * full
            )  # a head alone may be a stage


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "dp=2,pp=2,microbatches=2", "dp=2,tp=2"])
@pytest.mark.parametrize("model", ["gpt", "unused_twice"])
@pytest.mark.slow
def test_one_rank_gives_one_copy_its_values(plan: str, model: str, monkeypatch: pytest.MonkeyPatch):
    job = make_job(model, "adamw")
    filled: list[int] = []
    fill = UnfilledModel.fill_slices

    def counted(self: UnfilledModel, slices: list[Any], sliced: set[str]) -> None:
        filled.append(sum(stop - start for _, start, stop, _ in slices))
        fill(self, slices, sliced)

    monkeypatch.setattr(UnfilledModel, "fill_slices", counted)
    with Trainer(job, plan, devices="simulated", share=True) as trainer:
        assert_ranks_start_as_one_device(trainer, job)
        assert all(replica.exchange.ownership.memory == "shared" for replica in trainer.replicas)
        whole = sum(each.numel() for each in build_model(job, CPU, None).parameters())
        assert whole == sum(filled) if "tp" not in plan else whole < sum(filled)
        assert filled.count(0) == len(filled) // 2  # replicas that give none


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ("lstm", "u_net") else pytest.mark.slow)
        for each in FAMILIES.values()
    ],
)
def test_families_start_as_one_device_in_slices(family: Family):
    job = family.make_job(False)
    with Trainer(job, "dp=2,zero=3", devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)
        assert not any("builds the whole" in each for each in trainer.replicas[0].notes())


def wide() -> nn.Module:
    """64 MiB in 16 matrices."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 2).mean()


def wide_job() -> Job:
    return replace(make_job("mlp", "adamw"), model=wide, data=lambda: torch.ones(64, 1024), loss=squares)


def _start_on_a_rank(init: str, transport: str) -> tuple[dict[str, Tensor], int]:
    """The starting parameters, and by how many bytes this process's memory grows at most before the first step."""
    torch.set_num_threads(1)
    status = Path("/proc/self/status")

    def kib(key: str) -> int:
        return int(re.findall(rf"{key}:\s+(\d+)", status.read_text())[0])

    nn.Linear(1024, 1024)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = kib("VmRSS") - kib("RssFile")  # libraries are loaded meanwhile
    job: Any = replace(wide_job(), init=init)
    with Trainer(job, "dp=2,zero=3", devices="cpu", share=True, transport=transport) as trainer:
        grown = kib("VmHWM") - kib("RssFile") - before
        return {name: each.clone() for name, each in trainer.together(full_state)[0].items()}, grown << 10


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "init", "most"),
    [("auto", "stream", 170), ("gloo", "stream", 140), ("auto", "keyed", 100), ("gloo", "keyed", 100)],
)
def test_a_rank_of_processes_holds_at_most_one_whole_model_and_by_convention_never(
    transport: str, init: Any, most: int
):
    """Of 64 MiB. With one copy for both rank 0 gives it all its values, so it sees both; with slices each takes its half of each unit. Another whole
    one would be 190 and 160, and 128 by convention."""
    job = replace(wide_job(), init=init)
    expected = {name: each.clone() for name, each in build_model(job, CPU, None).named_parameters()}
    for found, grown in on_ranks(_start_on_a_rank, 2, init, transport):
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in found
        )
        # what earlier tests left to the allocator moves this by 20 MiB
        assert grown < most << 20


def array_written() -> Callable[[], nn.Module]:
    """A model function that writes a tensor through its numpy array."""
    build = make_job("gpt", "adamw").model

    def model() -> nn.Module:
        made = build()
        next(made.parameters()).detach().numpy()[0] = 0.5
        return made

    return model


def different() -> Callable[[], nn.Module]:
    """A model function that draws something else each time."""
    build, numbers = make_job("mlp", "adamw").model, itertools.count()

    def model() -> nn.Module:
        torch.manual_seed(next(numbers))
        return build()

    return model


@pytest.mark.slow
def test_where_the_model_needs_values_ranks_receive_the_first_ones():
    job = replace(make_job("gpt", "adamw"), model=array_written())
    with Trainer(job, "pp=2,tp=2", devices="simulated") as trainer:
        found: dict[str, list[Tensor]] = {}
        for replica in trainer.replicas:
            assert replica.copied != Traffic()
            assert any("builds the whole model" in each for each in replica.notes())
            for name, each in state_of(replica.model).items():
                if not each.is_meta and name not in replica.shards.pieces:
                    found.setdefault(name, []).append(each)
        assert any(len(each) > 1 for each in found.values())
        assert all(torch.equal(each, copies[0]) for copies in found.values() for each in copies)


def test_ranks_that_would_build_different_models_are_told():
    """Each would have held a part of another one."""
    job = replace(make_job("mlp", "adamw"), model=different())
    with pytest.raises(JobError, match=r"has other values on rank 1 than on rank 0.*under dp alone"):
        Trainer(job, "dp=2,zero=3", devices="simulated")


def test_a_start_of_a_large_model_says_that_ranks_build_in_turn(monkeypatch: pytest.MonkeyPatch):
    job = make_job("mlp", "adamw")
    monkeypatch.setattr(starting_model, "MANY_BYTES", 1)
    with Trainer(job, "dp=2,zero=3", devices="simulated") as trainer:
        assert any("one after another" in each for each in trainer.replicas[0].notes())
    monkeypatch.setattr(starting_model, "total_bytes", lambda: 1)
    with pytest.raises(JobError, match=r'in turn.*Use Job\(init="keyed"\)'):
        Trainer(job, "dp=2,zero=3", devices="simulated")


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,tp=2"])
@pytest.mark.slow
def test_an_optimizer_function_may_read_values(plan: str):
    """They are one device's on every rank, whatever it holds."""
    read: list[list[float]] = []
    job = make_job("gpt", "adamw")

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        read.append([float(each.detach().norm()) for _, each in named])
        return torch.optim.AdamW([each for _, each in named])

    expected = [float(each.detach().norm()) for each in build_model(job, CPU, None).parameters()]
    with Trainer(replace(job, optimizer=optimizer), plan, devices="simulated") as trainer:
        assert [each for each in read if each == expected] == [expected] * len(trainer.replicas)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,tp=2"])
@pytest.mark.parametrize("from_files", [False, True])
@pytest.mark.slow
def test_an_optimizer_function_may_draw(plan: str, from_files: bool, tmp_path: Path):
    """It draws what it does on one device: after the construction or, where values come from files, after the
    job's seed alone."""
    job = make_job("gpt", "adamw")
    if from_files:
        save_file(
            {name: each.clone() for name, each in job.model().state_dict().items()},
            tmp_path / "x.safetensors",
        )
        job = replace(job, weights=tmp_path / "x.safetensors")
    drawn: list[float] = []

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        drawn.append(float(torch.rand(())))
        return torch.optim.AdamW([each for _, each in named])

    with Trainer(replace(job, optimizer=optimizer), "dp=1", devices="simulated"):
        expected = drawn[-1]
    with Trainer(replace(job, optimizer=optimizer), plan, devices="simulated") as trainer:
        assert [each for each in drawn[1:] if each == expected] == [expected] * len(trainer.replicas)
        assert drawn[-1] == expected


@pytest.mark.slow
def test_a_model_that_was_built_before_is_taken_as_it_is():
    job = make_job("gpt", "adamw")
    models = [copy.deepcopy(build_model(job, CPU, None)) for _ in range(9)]
    with Trainer(replace(job, model=models.pop), "pp=2", devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)
