"""What ranks hold before the first step: one device's values, filled by each rank for itself where it holds a
part of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshloom import Trainer
from meshloom.comm.pieces import take
from meshloom.core.job import Job, NamedParameters
from meshloom.parameters.model import build_model, state_of
from meshloom.parameters.unfilled_model import build_unfilled
from meshloom.telemetry.traffic import Traffic
from tests.jobs import make_job

CPU = torch.device("cpu")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def assert_ranks_start_as_one_device(trainer: Trainer, job: Job) -> None:
    """Bit for bit, each rank what it holds; all of the model is held."""
    whole, held = state_of(build_model(job, CPU, None)), set[str]()
    for replica in trainer.replicas:
        for name, each in state_of(replica.model).items():
            if each.is_meta:
                continue
            pieces = replica.shards.pieces.get(name)
            expected = take(pieces, replica.shards.rank, whole[name]) if pieces else whole[name]
            assert torch.equal(each, expected), name
            held.add(name)
    assert held == whole.keys()


@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow),
        "dp=2,pp=2,tp=2,microbatches=2,zero=1",
    ],
)
@pytest.mark.parametrize("model", ["gpt", pytest.param("cnn", marks=pytest.mark.slow)])
def test_ranks_fill_what_they_hold_and_nothing_is_sent(plan: str, model: str):
    job = make_job(model, "adamw")
    with Trainer(job, plan, devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)
        assert all(replica.copied == Traffic() for replica in trainer.replicas)
        for replica in trainer.replicas[1:] if "zero" not in plan else ():  # else they lie in buckets
            sizes = {
                id(each): each.untyped_storage().nbytes()
                for each in replica.model.parameters()
                if not each.is_meta
            }
            full = sum(each.nbytes for each in build_model(job, CPU, None).parameters())
            assert sum(sizes.values()) < 0.8 * full


def resized() -> Callable[[], nn.Module]:
    """A model function that moves values within their memory, which a tape cannot say."""
    build = make_job("gpt", "adamw").model

    def model() -> nn.Module:
        made = build()
        made.register_buffer("count", torch.zeros(3).resize_(2))
        return made

    return model


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
    build, numbers = make_job("gpt", "adamw").model, itertools.count()

    def model() -> nn.Module:
        torch.manual_seed(next(numbers))
        return build()

    return model


@pytest.mark.parametrize(
    ("model", "note"),
    [(resized(), "builds the whole model"), (array_written(), "read-only"), (different(), None)],
)
def test_where_ranks_cannot_fill_alone_they_receive_the_first_ones_values(
    model: Callable[[], nn.Module], note: str | None
):
    job = replace(make_job("gpt", "adamw"), model=model)
    with Trainer(job, "pp=2,tp=2", devices="simulated") as trainer:
        found: dict[str, list[Tensor]] = {}
        for replica in trainer.replicas:
            assert replica.copied != Traffic()
            assert note is None or any(note in each for each in replica.notes())
            for name, each in state_of(replica.model).items():
                if not each.is_meta and name not in replica.shards.pieces:
                    found.setdefault(name, []).append(each)
        assert any(len(each) > 1 for each in found.values())
        assert all(torch.equal(each, copies[0]) for copies in found.values() for each in copies)


@pytest.mark.parametrize(("times", "is_long"), [(5, False), (1000, True)])
def test_a_start_that_takes_minutes_says_so(times: int, is_long: bool):
    """Nothing is drawn here: a matrix of 256 MiB is drawn again and again, as the tape has it."""

    def model() -> nn.Module:
        made = nn.Linear(8192, 8192, bias=False)
        for _ in range(times):
            nn.init.normal_(made.weight)
        return made

    _, unfilled, note = build_unfilled(replace(make_job("mlp", "sgd"), model=model), None)
    assert unfilled is not None and (note is not None) == is_long
    assert note is None or "on every rank" in note


def test_an_optimizer_function_may_read_values():
    """They are one device's on every rank, whatever it holds."""
    read: list[list[float]] = []
    job = make_job("gpt", "adamw")

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        read.append([float(each.detach().norm()) for _, each in named])
        return torch.optim.AdamW([each for _, each in named])

    expected = [float(each.detach().norm()) for each in build_model(job, CPU, None).parameters()]
    with Trainer(replace(job, optimizer=optimizer), "pp=2,tp=2", devices="simulated"):
        assert [each for each in read if each == expected] == [expected] * 4


def test_a_model_that_was_built_before_is_taken_as_it_is():
    job = make_job("gpt", "adamw")
    models = [build_model(job, CPU, None) for _ in range(5)]
    with Trainer(replace(job, model=models.pop), "pp=2", devices="simulated") as trainer:
        assert_ranks_start_as_one_device(trainer, job)
