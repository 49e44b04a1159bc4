"""A divided program's parameters lie in the stages in which the whole program uses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.pipeline.stages.duplicated_nodes import duplicate_reshards, split_fused_layers
from meshloom.pipeline.stages.stage_cutter import with_reshard_stages
from meshloom.pipeline.stages.stages import cut_into_stages, users_of
from meshloom.program.capture.capture import capture
from meshloom.program.ir.program import Program
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import choose
from tests.division import RATES, at_random
from tests.equality.models.table import MODELS
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class Three(nn.Module):
    """[batch, 7] -> [batch, 9]: three layers read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Linear(*sizes) for sizes in ((7, 5), (5, 9), (5, 9), (5, 9)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = torch.tanh(self.a(x))
        y = torch.tanh(y * self.b(x))
        return torch.tanh(y + self.c(x))


def read(job: Job) -> Program:
    data: Any = job.data()
    batches = (
        default_collate([data[at] for at in range(3)]),
        default_collate([data[at] for at in range(3, 6)]),
    )
    return capture(job, batches, dtype=torch.float64)


def check(program: Program, divided: Program, asked: dict[str, int]) -> Program:
    """Parameters lie in the stages in which the whole program uses them. The divided program, apart."""
    part = split_fused_layers(divided, asked)
    part, stage_of = duplicate_reshards(part, with_reshard_stages(part, asked))
    found, expected = (
        users_of(cut_into_stages(part, stage_of, 3)),
        users_of(cut_into_stages(program, asked, 3)),
    )
    assert {name: found[name] for name in program.parameters} == {
        name: expected[name] for name in program.parameters
    }
    return part


def test_layers_of_one_input_are_run_together_within_a_stage():
    """They were run together in the first of their stages, and took their parameters with them."""
    program = read(replace(make_job("mlp", "sgd"), model=Three))
    choice = choose(
        layout_of(program, BUILT_IN), 2, RATES, placements={"a": "column", "b": "column", "c": "column"}
    )
    divided = partition(choice).programs[0]
    together = [len(node.outputs) for node in divided.nodes if isinstance(node.target, GatheredLayers)]
    a, b, c = (next(at for at, node in enumerate(program.nodes) if node.path == name) for name in "abc")
    assert 3 in together
    for first, second, expected in ((b, c, [1, 1, 1]), (a, c, [1, 2]), (a - 1, a, [3])):
        asked = {node.name: (at >= first) + (at >= second) for at, node in enumerate(program.nodes)}
        part = check(program, divided, asked)
        assert (
            sorted(
                len(node.outputs)
                for node in part.nodes
                if isinstance(node.target, GatheredLayers) and "a" <= node.path <= "c"
            )
            == expected
        )


@pytest.mark.parametrize("name", ["reused", "llama"])
@pytest.mark.slow
def test_parameters_lie_where_they_are_used_without_tp(name: str):
    """A change of a parameter's placement was made once, in the first stage that used it, and its value was
    sent to the others. A batch of another shape was then refused: "uses up.weight, which lies in stage 0"."""
    model = MODELS[name]
    program = read(
        replace(make_job("mlp", "sgd"), model=model.build, loss=model.loss, data=lambda: model.samples(6))
    )
    count = len(program.nodes)
    for seed in range(5):
        divided = partition(at_random(seed)(layout_of(program, BUILT_IN), 2)).programs[0]
        for first, second in ((count // 4, count // 2), (count // 3, 2 * count // 3)):
            check(
                program,
                divided,
                {node.name: (at >= first) + (at >= second) for at, node in enumerate(program.nodes)},
            )
