"""What a step's machinery calls in Python beside torch's operators: counted, so that no machine's load matters. Times are in benchmarks/overhead/."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.step_shape import StepShape
from meshloom.exchange.all_reduce import AllReduce
from meshloom.program.capture.capture import capture
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.recompute.recompute import with_recomputation
from meshloom.program.run.execute import run_flat

LAYERS, PARAMETERS = 20, 300
ONCE = 60  # calls of a run or a step, whatever the number of operators or parameters


class Tiny(nn.Module):
    """[batch, 4] -> the same, by four operators a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4) * 0.1) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x * weight) + x * 0.5
        return x


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class Nobody:
    """A group of two whose other rank adds nothing, at once."""

    size, rank, is_in_place = 2, 0, True

    def all_reduce(self, *_: Any) -> Nobody:
        return self

    reduce_scatter = gather = all_reduce

    def wait(self) -> None:
        """Nothing is on its way."""


def calls_of(do: Callable[[], object]) -> Counter[str]:
    """Of functions of Python ("call") and of C ("c_call")."""
    found = Counter[str]()

    def hear(frame: FrameType, event: str, _: object) -> None:
        found[event] += 1

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        do()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    ("recompute", "most"), [("none", 1), pytest.param("full", 15, marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_a_program_calls_each_operator_and_little_else(recompute: str, most: int):
    """With recompute=full the forward runs twice, and each tensor that is saved passes through two hooks. most: calls for an operator."""
    job = Job(
        model=Tiny, loss=mean_square, optimizer=lambda named: torch.optim.SGD([each for _, each in named], 0.1), data=list, batch_size=3, steps=1,
    )  # fmt: skip
    batches = {"x": torch.randn(3, 4)}, {"x": torch.randn(3, 4)}
    program = capture(job, batches)
    if recompute != "none":
        program = with_recomputation(program, recompute)
    parameters, inputs = dict(Tiny().named_parameters()), list(leaves_of(batches[0]).tensors.values())

    def run() -> None:
        run_flat(program, parameters, {}, inputs)[0].backward()

    run()  # is compiled
    found = calls_of(run)
    assert found["call"] <= most * len(program.nodes) + ONCE, found


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_goes_into_its_bucket_by_one_call(overlap: bool):
    named = [(f"p{number}", nn.Parameter(torch.randn(4))) for number in range(PARAMETERS)]
    group: Any = Nobody()
    exchange = AllReduce(named, group, bucket_bytes=25 * 2**20, overlap=overlap)
    hooks = [(exchange.hook(each), each) for _, each in named]

    def report() -> None:
        for hook, parameter in hooks:
            hook(parameter)

    for _ in range(2):
        exchange.begin(StepShape())
        for _, parameter in named:
            parameter.grad = torch.zeros(4)
        found = calls_of(report)
    assert found["call"] <= PARAMETERS + ONCE, found
    assert found["c_call"] <= PARAMETERS + ONCE, found  # each is copied
