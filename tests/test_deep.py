"""Nothing that reads, divides and describes a program goes as deep as a model has layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.data.samples import first_batches
from meshloom.pipeline.stages.choose_cuts import choose_cuts
from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.cost.cost import costs
from meshloom.program.ir.transfer import pack, unpack
from meshloom.tensor_parallel.explain import account_of
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import choose
from tests.jobs import Samples

pytestmark = pytest.mark.usefixtures("silent_export")


class Block(nn.Module):
    """[batch, 4] -> [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x)


class Deep(nn.Module):
    """Blocks one after another."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _job(num_blocks: int) -> Job:
    return Job(
        model=lambda: Deep(num_blocks),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        data=lambda: Samples(x=torch.ones(2, 4)),
        batch_size=2,
        steps=1,
    )


def _described(num_blocks: int) -> int:
    """How many operators its program has, after all that `describe` does for a plan with tp, and `train` for
    one with pp."""
    job = _job(num_blocks)
    (batch,) = first_batches(job, 1, 2)
    program = capture_shapes(job, batch)
    priced = costs(program)
    account_of(partition(choose(layout_of(program, BUILT_IN), 2, priced=priced)), priced)
    packed = pack(program)
    assert pack(unpack(packed)) == packed
    stages = cut_into_stages(program, choose_cuts(program, priced, 4).stage_of, 4)
    assert sum(len(each.program.nodes) for each in stages) == len(program.nodes)
    assert max(len(each.program.nodes) for each in stages) <= len(program.nodes) // 4 + 4
    return len(program.nodes)


@pytest.mark.slow
def test_a_model_of_more_layers_than_python_has_frames_is_divided():
    assert _described(1100) == 2 * 1100 + 2


@pytest.mark.campaign
def test_a_model_of_5000_layers_is_divided():
    assert _described(5000) == 2 * 5000 + 2
