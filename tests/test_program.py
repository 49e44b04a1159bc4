"""A program as a value: its text, its hash, its cache, and how it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import described
from jobs import make_job
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.errors import CaptureError
from meshloom.core.random import KeyedDraws, seed_everything
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.ir.draws import seed_of_draw
from meshloom.program.run.execute import run_program
from meshloom.program.store.captured_loss import CapturedLoss

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def batches(model: str, count: int, size: int = 6) -> list[Any]:
    data = make_job(model, "sgd").data()
    return [
        default_collate([data[(number * size + each) % 30] for each in range(size)])
        for number in range(count)
    ]


def test_text_of_a_small_program():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 2)
            self.again = self.first
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            with torch.no_grad():
                scale = x.abs().max()
            return torch.dropout(self.again(x), 0.5, True) / scale

    program = capture_module(
        Small(),
        lambda model, batch: (model(batch["x"]).sum(), 4),
        ({"x": torch.ones(4, 3)}, {"x": torch.zeros(4, 3)}),
    )
    assert described(program).splitlines() == [
        "parameter first.weight: float32[2, 3], also again.weight",
        "parameter first.bias: float32[2], also again.bias",
        "buffer steps: int64[]",
        "input x: float32[4, 3]",
        "add = add.Tensor(steps, 1) -> int64[]",
        "abs = abs(x) -> float32[4, 3]  # no_grad",
        "max = max(abs) -> float32[]  # no_grad",
        "linear = linear(x, first.weight, first.bias) -> float32[4, 2]  # again",
        "dropout = dropout(linear, 0.5, True) -> float32[4, 2]  # draw 0",
        "div = div.Tensor(dropout, max) -> float32[4, 2]",
        "sum = sum(div) -> float32[]",
        "update steps = add",
        "return sum, 4",
    ]


@pytest.mark.slow
def test_equal_programs_have_equal_hashes():
    job, (a, b, c, d) = make_job("gpt", "sgd"), batches("gpt", 4)
    one, two = capture(job, (a, b)), capture(job, (c, d))
    assert one.digest() == two.digest()
    assert one.digest() != capture(job, (a, b), training=False).digest()


@pytest.mark.slow
def test_programs_are_read_once_per_shape_and_mode():
    programs = CapturedLoss(make_job("mlp", "sgd"))
    six, four = batches("mlp", 4), batches("mlp", 4, size=4)
    assert programs.get(six[0]) is None
    program = programs.capture(six)
    assert programs.get(six[3]) is program and programs.capture(six[2:]) is program
    assert programs.capture(four) is not program
    assert programs.capture(six, training=False) is not program
    with pytest.raises(CaptureError, match="takes two batches of equal shapes, got 1"):
        programs.capture(six[:1], training=True)


def test_loss_with_a_number_beside_it():
    model = nn.Linear(3, 2)
    loss = lambda model, batch: (model(batch).sum(), (batch > 0).sum().item(), batch.shape[0])  # noqa: E731
    program = capture_module(model, loss, (torch.randn(4, 3), torch.randn(4, 3)))
    batch = torch.randn(4, 3)
    assert run_program(program, dict(model.named_parameters()), {}, batch)[1:] == loss(model, batch)[1:]


def test_grad_mode_and_contexts_are_put_back_after_an_error():
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                return torch.linalg.cholesky(x).sum()

    model = Breaks()
    program = capture_module(model, lambda model, batch: model(batch), (torch.eye(3), 2 * torch.eye(3)))
    with pytest.raises(torch.linalg.LinAlgError):
        run_program(program, {}, {}, -torch.eye(3))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        assert not run_program(program, {}, {}, torch.eye(3)).requires_grad
        assert not torch.is_grad_enabled()


def test_a_draw_can_be_repeated_by_its_number():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    program = capture_module(
        model, lambda model, batch: model(batch).sum(), (torch.ones(20), torch.zeros(20) + 2)
    )
    values: list[Tensor] = []
    seed_everything(3)
    run_program(program, {}, {}, torch.ones(20), visit=lambda node, value: values.append(value))
    assert program.nodes[1].draw == 1
    seed_everything(seed_of_draw(3, 1))
    with KeyedDraws():
        assert torch.equal(torch.dropout(values[0], 0.5, True), values[1])
