"""Under tp=2 a rank holds half of the parameters, gradients and optimizer state of one device, and nothing of
the models that were read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import check_against_eager
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.jobfile import load_job
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.train.trainer import Trainer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
EXAMPLE = Path(__file__).parents[1] / "examples/06_tensor_parallel.py"


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their distinct memories."""
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.slow
def test_a_rank_holds_half_of_parameters_gradients_and_optimizer_state():
    job: Any = load_job(str(EXAMPLE))
    held: dict[str, list[dict[str, int]]] = {}
    for plan in ("dp=1", "tp=2"):
        made: list[torch.optim.Optimizer] = []

        def optimizer(named: Any, made: list[torch.optim.Optimizer] = made) -> torch.optim.Optimizer:
            made.append(job.optimizer(named))
            return made[-1]

        with Trainer(replace(job, optimizer=optimizer), plan, devices="simulated", steps=1) as trainer:
            for batch in trainer.batches():
                trainer.step(batch)
            held[plan] = [
                {
                    "parameters": num_bytes(replica.model.parameters()),
                    "gradients": num_bytes(
                        each.grad for each in replica.model.parameters() if each.grad is not None
                    ),
                    "state": num_bytes(value for state in own.state.values() for value in state.values()),
                }
                for replica, own in zip(trainer.replicas, made, strict=True)
            ]
    (one,) = held["dp=1"]
    assert one["state"] > 2 * one["parameters"]  # two moments and a step for each
    for rank in held["tp=2"]:
        for kind, size in rank.items():
            assert size <= 0.55 * one[kind], f"{kind}: {size} of {one[kind]} bytes"


@pytest.mark.slow
def test_no_rank_keeps_parameters_as_the_model_was_built_with_them():
    """Units, found in the whole model, kept all of it, though without values."""
    job: Any = load_job(str(EXAMPLE))
    built: list[weakref.ref[nn.Parameter]] = []

    def model() -> nn.Module:
        made = job.model()
        built.extend(weakref.ref(each) for each in made.parameters() if each.ndim > 1)
        return made

    with Trainer(replace(job, model=model), "dp=2,tp=2,zero=3", devices="simulated", steps=1) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        whole = {tuple(each.shape) for each in job.model().parameters() if each.ndim > 1}
        here = [found for each in built if (found := each()) is not None]
        assert not [each for each in here if tuple(each.shape) in whole and num_bytes([each])]


def test_reading_leaves_no_parameters_behind():
    """torch.export left the model that it read in reference cycles: half as much again on rank 0, until
    Python happened to collect them."""
    job: Any = load_job(str(EXAMPLE))
    built: list[weakref.ref[nn.Parameter]] = []

    def model() -> nn.Module:
        made = job.model()
        built.extend(map(weakref.ref, made.parameters()))
        return made

    data = job.data()
    batches = [[torch.stack([data[number + each][0] for each in range(2)])] for number in range(0, 8, 2)]
    program = CapturedLoss(replace(job, model=model)).capture(batches)
    assert program.parameters
    assert built
    assert not [each for each in built if each() is not None]


def test_a_model_that_the_job_builds_anew_is_compared_without_a_copy():
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("this module holds a connection")

    job = Job(
        model=lambda: Uncopied(3, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
        batch_size=2,
        steps=1,
    )
    batches = list(torch.arange(24.0).view(4, 2, 3))
    program = CapturedLoss(job).capture(batches)
    assert check_against_eager(program, job, batches[2:]).error <= 2e-6
