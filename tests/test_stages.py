"""Programs are cut into stages: where the choice or the user says, with what crosses and who uses what. That stages compute what
one device does is asked by the equality matrix, and cut anywhere by `test_any_choice.py` and `test_crossing.py`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.errors import PlanError
from meshloom.pipeline.stages.choose_cuts import choose_cuts
from meshloom.pipeline.stages.stages import cut_into_stages, users_of
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.cost.cost import costs
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_flat
from tests.families import FAMILIES
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


@cache
def program_of(name: str) -> Program:
    """A family's, of two samples, in float64."""
    job = FAMILIES[name].make_job(True)
    data = job.data()
    batch = default_collate([data[0], data[1]])
    return capture(job, (batch, batch), dtype=torch.float64)


def evenly(program: Program, num_stages: int) -> dict[str, int]:
    """As many operators for each stage, whatever they are: through the middle of everything."""
    count = len(program.nodes)
    return {node.name: number * num_stages // count for number, node in enumerate(program.nodes)}


@pytest.mark.slow
def test_what_is_computed_of_the_batch_does_not_cross():
    program = program_of("bert")
    stages = cut_into_stages(program, evenly(program, 4), 4)
    crossing = [each for stage in stages for each in stage.incoming]
    assert crossing
    assert all(each.meta.dtype == torch.float64 for each in crossing)  # no masks, no positions
    inputs = {
        each.name
        for stage in stages
        for each in stage.program.inputs
        if not each.name.startswith("from stage")
    }
    assert inputs == {each.name for each in program.inputs}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"num_stages": 2, "cuts": ["model.layers.7"]},
            "no module of that name runs in the forward. Did you mean model.layers.1?",
        ),
        ({"num_stages": 3, "cuts": ["model.layers.1"]}, "makes 2 stages, and the plan has 3. Name 2."),
        (
            {"num_stages": 3, "cuts": ["model.layers.1", "model.layers.0"]},
            "model.layers.0 runs before model.layers.1",
        ),
        ({"num_stages": 10_000}, "and 10000 stages need 9999. Use at most"),
        ({"num_stages": 2, "memory_bytes": 1000.0}, "No cut into 2 stages fits into 1000 B a rank"),
    ],
)
@pytest.mark.slow
def test_cuts_that_cannot_be(settings: dict[str, Any], sentence: str):
    program = program_of("llama")
    with pytest.raises(PlanError, match=re.escape(sentence)):
        choose_cuts(program, costs(program), **settings)


def test_given_cuts_are_where_the_modules_begin():
    program = program_of("llama")
    choice = choose_cuts(program, costs(program), 2, cuts=["model.layers.1"])
    for node in program.nodes:
        if node.path.startswith("model.layers."):
            assert choice.stage_of[node.name] == int(node.path.startswith("model.layers.1"))


def test_a_program_of_one_stage_is_itself():
    job = make_job("mlp", "sgd")
    data = job.data()
    batch = default_collate([data[0], data[1]])
    program = capture(job, (batch, batch))
    (stage,) = cut_into_stages(program, dict.fromkeys((node.name for node in program.nodes), 0), 1)
    assert not stage.incoming and not stage.outgoing
    assert stage.program.nodes == program.nodes and stage.program.outputs == program.outputs


class _Sums(nn.Module):
    """Two sums, of which the graph calls the first `sum` and the second `sum_1`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        rows, total = made.sum(dim=0), made.square().sum()
        return (rows * 0.5).mean() + total * 0.1


def test_values_that_cross_may_be_called_as_functions_of_python_are():
    """A stage's operand `sum` was written over another one, `sum_1`, as the function that runs its program
    cannot call an argument `sum`."""
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    module = _Sums().double()
    program = capture_module(module, lambda module, batch: module(batch), (x, x))
    names = [node.name for node in program.nodes]
    assert {"sum", "sum_1"} <= {*names}
    after = max(names.index("sum"), names.index("sum_1")) + 1
    stages = cut_into_stages(program, {name: int(number >= after) for number, name in enumerate(names)}, 2)
    assert {each.value for each in stages[1].incoming} == {"sum", "sum_1"}
    state = dict(module.named_parameters())
    crossing = dict(zip(stages[0].sent, run_flat(stages[0].program, state, {}, [x]), strict=False))
    (loss,) = run_flat(
        stages[1].program, state, {}, [crossing[each.value] for each in stages[1].program.inputs]
    )
    assert torch.equal(loss, module(x))


class _Shared(nn.Module):
    """One layer before and after a normalisation, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.norm(self.first(x)))).sum()


def test_who_uses_a_parameter_or_buffer():
    model = _Shared().train()
    program = capture_module(model, lambda model, batch: model(batch), (torch.randn(3, 4), torch.randn(3, 4)))
    normal = [number for number, node in enumerate(program.nodes) if node.path == "norm"]
    stage_of = {
        node.name: (number >= normal[0]) + (number > normal[-1]) for number, node in enumerate(program.nodes)
    }
    stages = cut_into_stages(program, stage_of, 3)
    assert users_of(stages) == {
        "first.weight": (0, 2), "first.bias": (0, 2), "norm.weight": (1,), "norm.bias": (1,), "second.weight": (2,), "second.bias": (2,), "unused": (0,),
        "norm.running_mean": (1,), "norm.running_var": (1,), "norm.num_batches_tracked": (1,),
    }  # fmt: skip
    assert [stage.changing for stage in stages] == [
        frozenset(),
        {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
        frozenset(),
    ]
