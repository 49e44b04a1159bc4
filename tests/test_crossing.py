"""What goes from one stage to the next arrives as it was, whatever the operators on either side expect of it:
cut at every place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.pipeline.stages import choose_cuts
from meshloom.pipeline.stages.intervals import Intervals
from meshloom.pipeline.stages.stage_cutter import with_reshard_stages
from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.program.capture.capture import capture
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import choose
from tests.any_choice import Readings
from tests.division import RATES
from tests.jobs import make_job, vectors
from tests.verified import equals_one_device

pytestmark = pytest.mark.usefixtures("silent_export")


class ListOfOne(nn.Module):
    """Lists of a single tensor, of which nodes pick."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        (hidden,) = self.first(x).tanh().chunk(1, 1)
        (logits,) = self.second(hidden).split([5], 1)
        return logits


class Permuted(nn.Module):
    """[batch, 7] -> [batch, 5]. Between the permutations lies what only is a matrix row by row while its dims
    keep their order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 30), nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x).view(-1, 2, 3, 5).permute(0, 3, 1, 2)[:, :3]  # [batch, 3, 2, 3], with gaps
        features = features.tanh().tanh()
        return self.second(features.permute(0, 2, 3, 1).view(-1, 18))


class Expanded(nn.Module):
    """[batch, 7] -> [batch, 5]. What is expanded has one row in memory, and any number of its expanded dims
    can be viewed as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.first(x).mean(0)
        rows = mean.expand(2, x.shape[0], 3).transpose(0, 1)
        return self.second((rows.view(-1, 3) * 2).view(-1, 6))


class Gated(nn.Module):
    """Gated units over odd halves: a rank's part of a layer's outputs is whole in no half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 22), nn.Linear(11, 10), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.glu(self.second(F.glu(self.first(x)))))


def job_of(model: Callable[[], nn.Module]) -> Job:
    return replace(make_job("mlp", "sgd"), model=model)


@pytest.mark.parametrize("model", [ListOfOne, Permuted, Expanded])
@pytest.mark.long
def test_a_model_cut_at_every_place_equals_one_device(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
):
    """A normalising flow under pp=2 ended in "view size is not compatible": a value with gaps in memory
    arrived contiguous, what was computed of it was, too, and a view that one device can make could not be
    made. A list of one tensor crossed as if it were a tensor ("'tuple' object has no attribute
    'requires_grad'")."""
    cuts: list[Sequence[int]] = [(0,)]

    def cut(line: Intervals, limits: Any, told: Any) -> list[int]:
        cuts[0] = line.places
        return [line.places[number]]

    monkeypatch.setattr(choose_cuts, "best_cuts", cut)
    monkeypatch.setattr(choose_cuts, "refined", lambda line, limits, cuts, price, told: cuts)
    job = replace(job_of(model), batch_size=6)
    with Readings().kept(monkeypatch):
        number = 0
        while number < len(cuts[0]):
            equals_one_device(job, "pp=2,microbatches=2", steps=1)
            number += 1
    assert number > 3


@pytest.mark.long
def test_layers_that_gather_their_input_stay_in_their_stage():
    """Divided over tp, such layers give a tuple, which crossed the cut behind what they read: uneven gated
    units under pp=2,tp=2."""
    data: Any = vectors()
    batches = (
        default_collate([data[at] for at in range(3)]),
        default_collate([data[at] for at in range(3, 6)]),
    )
    program = capture(job_of(Gated), batches, dtype=torch.float64)
    part = partition(choose(layout_of(program, BUILT_IN), 2, RATES)).programs[0]
    lists = {ref.name for node in part.nodes if node.target is operator.getitem for ref in node.operands()}
    assert lists
    for cut in range(1, len(program.nodes)):
        asked = {node.name: int(at >= cut) for at, node in enumerate(program.nodes)}
        stages = cut_into_stages(part, with_reshard_stages(part, asked), 2)
        assert not {each.value for stage in stages for each in stage.incoming} & lists
        linear = {node.name for node in program.nodes if node.operator == "linear"}
        for stage in stages:
            assert all(
                asked[node.name] == stage.number for node in stage.program.nodes if node.name in linear
            )
