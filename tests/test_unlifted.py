"""What is verified in float64 is what is trained: divisions and cuts are those that are chosen in the job's
own precision."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom.pipeline.stages.program_store
import meshloom.pipeline.stages.stage_cutter
import meshloom.tensor_parallel.division
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.store.unlifted import unlifted
from meshloom.replica.program_stages import ProgramStages
from meshloom.tensor_parallel.layout.placement import Part
from meshloom.train.trainer import Trainer
from meshloom.verify.findings import lines_of
from meshloom.verify.run import verify
from tests.verified import equals_one_device


class Mixed(nn.Module):
    """A block in bfloat16 between layers in float32: in float64 its values weigh four times as much, the
    others twice."""

    def __init__(self, *, low: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        if low:
            self.middle.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)).to(self.middle.weight.dtype)
        return self.last(torch.tanh(self.middle(y)).to(self.last.weight.dtype))


class Normed(nn.Module):
    """Blocks as many models have them: a norm in float32 beside a residual, which in float32 is cast to what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.scales = nn.ParameterList(torch.ones(24) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for scale, layer in zip(self.scales, self.layers, strict=True):
            wide = h.to(torch.float32)
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            h = h + torch.tanh(layer(scale * wide.type_as(h)))
        return h.float()


class Uneven(nn.Module):
    """Layers that compute and then operators that move bytes, of which only these take longer in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        for _ in range(8):
            x = torch.tanh(x)
        return x * self.scale


TALKING = Rates(
    flops_per_second=1e7,
    bytes_per_second=1e10,
    link_bytes_per_second=1e6,
    latency_seconds=1e-7,
    start_seconds=0.0,
    memory_price=0.0,
)
COMPUTING = Rates(
    flops_per_second=1e7,
    bytes_per_second=1e7,
    link_bytes_per_second=1e9,
    latency_seconds=1e-7,
    start_seconds=0.0,
    memory_price=0.0,
)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean().double()


def job_of(model: Any) -> Job:
    samples = [{"x": each} for each in torch.randn(8, 16, generator=torch.Generator().manual_seed(3))]
    return Job(
        model=model, data=lambda: samples, loss=loss, optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), batch_size=4, steps=1,
    )  # fmt: skip


def chosen(job: Job, plan: str, dtype: torch.dtype | None = None) -> Any:
    """How every operator is computed along tp, or in which stage."""
    with Trainer(job, Plan.parse(plan), devices="simulated", dtype=dtype) as trainer:
        stages = trainer.replicas[0].engine.stages
        assert isinstance(stages, ProgramStages)
        if stages.division is not None:
            return stages.division.first.choice.input_placements, stages.division.first.choice.strategies
        assert stages.cutter.choice is not None
        return stages.cutter.choice.stage_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "rates"),
    [(Mixed, "tp=2", TALKING), (partial(Mixed, low=False), "tp=2", TALKING), (Uneven, "pp=2", COMPUTING)],
)
def test_what_float64_verifies_is_what_is_trained(
    model: Any, plan: str, rates: Rates, monkeypatch: pytest.MonkeyPatch
):
    """The program was priced as it was read for verification, in which all values weigh twice as much:
    another division was verified than is trained."""
    monkeypatch.setattr(meshloom.tensor_parallel.division, "rates_for", lambda *_: rates)
    monkeypatch.setattr(meshloom.pipeline.stages.stage_cutter, "rates_here", lambda *_: rates)
    job = job_of(model)
    trained = chosen(job, plan)
    assert chosen(job, plan, torch.float64) == trained
    equals_one_device(job, plan, steps=1)
    monkeypatch.setattr(meshloom.pipeline.stages.program_store, "unlifted", lambda *_: None)
    assert chosen(job, plan, torch.float64) != trained  # by the prices of float64


@pytest.mark.slow
def test_where_a_cast_allows_less_parameters_are_held_as_in_training(monkeypatch: pytest.MonkeyPatch):
    """A part of a sum goes through `.float()` in float32, where it changes nothing; in float64 it rounds, and
    has to be given the sum."""
    monkeypatch.setattr(
        meshloom.tensor_parallel.division, "rates_for", lambda *_: replace(TALKING, link_bytes_per_second=1e7)
    )
    job = replace(
        job_of(lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32))),
        loss=lambda model, batch: model(batch["x"]).float().mean(),
    )
    (held, ways), (lifted, lifted_ways) = chosen(job, "tp=2"), chosen(job, "tp=2", torch.float64)
    assert lifted == held and any(isinstance(each, Part) and each.cut for each in held.values())
    assert lifted_ways != ways
    equals_one_device(job, "tp=2", steps=1)


@pytest.mark.slow
def test_a_value_that_is_cast_to_what_it_is_has_the_same_uses_in_each_precision():
    """What was added to the cast value in float32, and to the value itself in float64, was divided by the prices of float64."""
    batch = {"x": torch.randn(4, 16)}
    programs = [capture_shapes(job_of(Normed), batch, dtype=dtype) for dtype in (None, torch.float64)]
    uses = [[(node.name, [ref.name for ref in node.operands()]) for node in each.nodes] for each in programs]
    assert uses[0] == uses[1]
    assert not any("alias" in name for name, _ in uses[0])
    found = unlifted(programs[1], job_of(Normed), batch, {"x": torch.float32})
    assert found is not None and found.digest() == programs[0].digest()


@pytest.mark.slow
def test_the_digest_of_what_float64_verifies_is_that_of_training():
    reports = [
        verify(job_of(Normed), Plan.parse("tp=2"), devices="simulated", steps=1, dtype=dtype)
        for dtype in (None, torch.float64)
    ]
    assert all(each is not None and each.passed for each in reports)
    first, second = (each for each in reports if each is not None)
    assert first.digest == second.digest
    assert any(
        line.endswith("as `meshloom train` prints it for this job and plan") for line in lines_of(first)
    )
    assert any(line.endswith("may have another") for line in lines_of(second))


@pytest.mark.slow
def test_a_model_that_does_something_else_in_each_precision_has_no_program_in_its_own():
    def build(dtype: torch.dtype | None) -> Program:
        return capture_shapes(job, batch, dtype=dtype)

    class Asking(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if x.dtype == torch.float64 else x)

    batch = {"x": torch.randn(4, 16)}
    dtypes = {"x": torch.float32}
    job = job_of(Asking)
    assert unlifted(build(torch.float64), job, batch, dtypes) is None
    job = job_of(Mixed)
    found = unlifted(build(torch.float64), job, batch, dtypes)
    assert found is not None and found.digest() == build(None).digest()
