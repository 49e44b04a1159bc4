"""A model that `torch.compile` wraps is, but for its speed, the model: same names, same checkpoints, under
every plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshloom.core.job import Job
from meshloom.core.modules.compiled import named_as_written, without_compilation
from meshloom.train.trainer import Trainer
from tests import jobs_in_memory
from tests.fitted import fitted
from tests.jobs import MLP, make_job
from tests.verified import equals_one_device

pytestmark = pytest.mark.usefixtures("silent_export")
compiled: Any = partial(torch.compile, backend="eager")  # inductor's kernels are not what is tested


def whole() -> nn.Module:
    return compiled(MLP())


def a_layer() -> nn.Module:
    model = MLP()
    model.second = compiled(model.second)
    return model


def in_place() -> nn.Module:
    model = MLP()
    model.compile(backend="eager")
    return model


FORMS = [whole, a_layer, in_place]


def job_of(model: Callable[[], nn.Module]) -> Job:
    return dataclasses.replace(make_job("mlp", "adamw"), model=model)


@pytest.mark.parametrize("model", FORMS)
def test_names_are_those_without_it_and_what_was_compiled_is_called(model: Callable[[], nn.Module]):
    found = named_as_written(model())
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in MLP().named_parameters()]
    assert without_compilation(found) == (["second"] if model is a_layer else [""])
    assert without_compilation(found) == []


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("model", FORMS)
@pytest.mark.slow
def test_a_plan_equals_one_device(model: Callable[[], nn.Module], plan: str):
    equals_one_device(job_of(model), plan, steps=1)


@pytest.mark.covering("whole-MLP", "MLP-whole")
@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "plan"), [(whole, MLP, "dp=1"), (MLP, whole, "dp=1"), (a_layer, in_place, "pp=2")]
)
def test_either_form_resumes_the_other(
    before: Callable[[], nn.Module], after: Callable[[], nn.Module], plan: str, tmp_path: Path
):
    """Names in checkpoints had `_orig_mod.` in them."""
    fitted(job_of(before), plan, steps=1, out=tmp_path)
    found = losses(job_of(after), plan, steps=2, resume=tmp_path)
    # compiled operators may be fused
    assert found == pytest.approx(losses(job_of(MLP), plan, steps=2)[1:], rel=1e-6)


def losses(job: Job, plan: str, **settings: Any) -> list[float]:
    with Trainer(job, plan, devices="simulated", **settings) as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]


made: list[Any] = []  # what `counting` has compiled


def counting(graph: Any, inputs: Any) -> Any:
    made.append(graph)
    return graph.forward


class Normalising(nn.Module):
    """x [n, 5] -> [n, 3]. A method and a function that are compiled by themselves, as libraries have them; a module is
    called, and numbers are drawn, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    @torch.compile(fullgraph=True, backend=counting)
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(self.first(x)), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(centred(self.hidden(x)))


@partial(torch.compile, backend=counting)
def centred(h: torch.Tensor) -> torch.Tensor:
    return h - h.mean(1, keepdim=True)


def normalising() -> Job:
    return jobs_in_memory.job_of(
        Normalising,
        lambda model, x: model(x).square().mean(),
        list(jobs_in_memory.normal(3, 5)),
        optimizer=jobs_in_memory.sgd,
    )


@pytest.mark.parametrize(("plan", "compiles"), [("dp=2", True), ("tp=2", False)])
@pytest.mark.long
def test_functions_that_are_compiled_by_themselves(plan: str, compiles: bool):
    """They stay compiled where the loss is not read."""
    torch.compiler.reset()
    made.clear()
    fitted(normalising(), plan)
    assert bool(made) == compiles


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.slow
def test_compiled_functions_equal_one_device(plan: str):
    equals_one_device(normalising(), plan)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "dp=2,pp=2,tp=2"])
def test_kernels_of_inductor_equal_one_device(plan: str, monkeypatch: pytest.MonkeyPatch):
    """Reading a loss once gave tensors without values to a kernel, which ended the process; inductor draws by a generator
    of its own."""
    torch.compiler.reset()
    monkeypatch.setitem(
        globals(), "centred", torch.compile(lambda h: nn.functional.dropout(h, 0.2) - h.mean(1, keepdim=True))
    )
    equals_one_device(normalising(), plan)
