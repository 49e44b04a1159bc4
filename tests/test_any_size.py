"""One program for all sizes of a batch that a loss is indifferent to; where it asks for a size, the loss is
read at the sizes that come.

Every length of a padded batch used to take a reading of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_unflatten

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.steps import run_in_steps
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, seed_everything
from meshloom.pipeline.stages.program_store import ProgramStore
from meshloom.program.run.execute import run_program
from meshloom.program.store import captured_loss as module

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

WIDTH = 6
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A layer, and whatever `forward` does of [batch, tokens, WIDTH] besides."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(WIDTH, WIDTH), nn.Embedding(64, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("causal", torch.ones(64, 64).tril().bool())
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, self.layer(x))


def job_of(forward: Forward) -> Job:
    return Job(
        model=lambda: Model(forward),
        loss=lambda model, batch: (model(batch["x"]).square().sum(), batch["x"].shape[0]),
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        data=lambda: [0],
        batch_size=4,
        steps=1,
    )


def batch_of(samples: int, tokens: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(
            samples, tokens, WIDTH, generator=torch.Generator().manual_seed(100 * samples + tokens)
        )
    }


def follow(job: Job, batches: Sequence[Any]) -> list[int]:
    """Readings so far, after each batch: whose program computes what eager does, loss and gradients, bit for
    bit, whatever is drawn."""
    programs = ProgramStore(job, Plan(), simulated_groups(1)[0])
    model = job.model()
    found: list[int] = []
    for number, batch in enumerate(batches):
        if number == 0:
            run_in_steps([programs.open([batch], simulated_groups(1)[0], job.model())])
        run_in_steps([programs.ready(batch)])
        (stage,) = programs.stages(programs.key(batch))
        with KeyedDraws():
            wanted = gradients(model, partial(job.loss, model), batch)
        tensors = dict(model.named_parameters()), dict(model.named_buffers())
        assert (
            gradients(
                model,
                lambda given: tree_unflatten(
                    run_program(stage.program, *tensors, given),  # noqa: B023
                    stage.returned,  # noqa: B023
                ),
                batch,
            )
            == wanted
        )
        found.append(programs.num_captured)
    return found


def gradients(model: nn.Module, run: Callable[[Any], Any], batch: Any) -> list[Any]:
    model.zero_grad()
    seed_everything(3)
    returned = run(batch)
    total, *weight = returned if isinstance(returned, tuple) else (returned,)
    total.backward()
    return [
        total.item(),
        *weight,
        *(None if each.grad is None else each.grad.tolist() for each in model.parameters()),
    ]


def attention(heads: int, **settings: Any) -> Forward:
    def forward(model: Model, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q = x.view(batch, tokens, heads, width // heads).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(q, q, q, **settings).transpose(1, 2).reshape(batch, tokens, width)
        )

    return forward


def masked(model: Model, x: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
    return (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1) @ x


INDIFFERENT: dict[str, Forward] = {
    "attention": attention(2, is_causal=True),
    "a mask that is made": masked,
    "a mask that is cut out": lambda model, x: (
        (x @ x.transpose(1, 2)).masked_fill(~model.causal[: x.shape[1], : x.shape[1]], 0.0) @ x
    ),
    "places": lambda model, x: x + model.places(torch.arange(x.shape[1])),
    "a share": lambda model, x: x.sum(1) / x.shape[1] + x.mean() / len(x.shape),
    "a number that is filled in": lambda model, x: x + torch.full_like(x, x.shape[1]),
    "shifted": lambda model, x: x[:, 1:] * x[:, :-1],
    "rolled": lambda model, x: x.roll(x.shape[1] // 2, 1),
    "half": lambda model, x: x[:, : x.shape[1] // 2].sum(1),
    "flat": lambda model, x: x.reshape(x.shape[0] * x.shape[1], -1).softmax(0),
    "repeated": lambda model, x: x.repeat(1, 2, 1) @ x.transpose(1, 2),
    "expanded": lambda model, x: x.mean(1, keepdim=True).expand(-1, x.shape[1], -1) * x,
    "padded": lambda model, x: F.pad(x, (0, 0, 2, 1)).cumsum(1),
    "dropout": lambda model, x: model.dropout(x),
    "the first two": lambda model, x: torch.stack([x[:, number] for number in range(2)], 1),
}
INDIFFERENT["all of it"] = lambda model, x: torch.stack(
    [each(model, x).square().sum() for name, each in INDIFFERENT.items() if name != "all of it"]
)
BY_SIZE: dict[str, Forward] = {
    "a root": lambda model, x: x / math.sqrt(x.shape[1]),
    "a power": lambda model, x: x * x.shape[1] ** -0.5,
    "a constant": lambda model, x: x * torch.tensor([1.0 / x.shape[1]]),
    "a list": lambda model, x: x + torch.tensor(list(range(x.shape[1])))[:, None],
    "a loop": lambda model, x: sum((x[:, number] for number in range(x.shape[1])), x[:, 0]),
    "a rounded quotient": lambda model, x: x * (1 / (x.shape[1] // 4)),
}
# 6: the width; 4: the batch
SIZES = [(4, 9), (4, 6), (4, 11), (4, 17), (3, 23), (2, 8), (6, 6), (4, 40), (2, 3), (5, 13)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [each if each == "all of it" else pytest.param(each, marks=pytest.mark.slow) for each in INDIFFERENT],
)
def test_three_readings_serve_all_sizes(kind: str):
    assert follow(job_of(INDIFFERENT[kind]), [batch_of(*each) for each in SIZES])[2:] == [3] * (
        len(SIZES) - 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_SIZE)
def test_where_a_size_becomes_something_else_each_is_read(kind: str):
    sizes = [(4, 9), (4, 6), (4, 11), (4, 8)]
    assert follow(job_of(BY_SIZE[kind]), [batch_of(*each) for each in sizes])[-1] >= len(sizes)


@pytest.mark.slow
def test_each_side_of_a_question_has_a_program_of_its_own():
    """Sizes on the other side of one that is asked for are read for themselves."""
    asks = job_of(lambda model, x: x.tanh() if x.shape[1] == x.shape[2] else x)  # the width, 6
    assert follow(asks, [batch_of(4, each) for each in (9, 6, 11, 8, 14, 6, 17)]) == [1, 2, 3, 4, 4, 4, 4]
    asks = job_of(lambda model, x: x.tanh() if x.shape[1] > 16 else x)
    assert follow(asks, [batch_of(4, each) for each in (9, 20, 11, 12, 16, 17, 25, 18, 40, 5)]) == [
        1,
        2,
        3,
        4,
        4,
        5,
        6,
        6,
        6,
        6,
    ]


def test_a_loss_that_is_another_one_at_each_size_is_refused_with_the_dim_that_varies(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "MAX_SHAPES", 3)
    wanted = (
        r"captured for batches of 3 shapes, and here is another one: dim 1 of x has had 4 sizes \(6, 8, 9, 11, \.\.\.\)\. "
        r"Each needs its own capture, because it asks for sizes at .*test_any_size\.py:\d+ .*\. Pad x in collate to one size"
    )
    with pytest.raises(CaptureError, match=wanted):
        follow(job_of(BY_SIZE["a loop"]), [batch_of(*each) for each in [(4, 9), (4, 6), (4, 11), (4, 8)]])
