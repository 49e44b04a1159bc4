"""Seconds of a program are the sum over its operators, each on the curve of its kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshloom.machine.machine import COUNTED_IN_FLOPS, example_machine
from meshloom.program.capture.capture import capture_module
from meshloom.program.cost.cost import Cost, costs
from meshloom.program.cost.program_seconds import KIND_OF, kind_of, node_seconds, program_seconds
from meshloom.program.ir.program import Program

pytestmark = pytest.mark.long
MACHINE = example_machine()  # 1e9 FLOP/s, 1e9 bytes/s, a call is 1 us


class Net(nn.Module):
    """One operator of most kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y = F.scaled_dot_product_attention(y, y, y)
        return F.gelu(self.out(y)).mul_(2.0).transpose(1, 2)


@pytest.fixture(scope="module")
def program() -> Program:
    batches = torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)
    return capture_module(Net(), lambda model, batch: model(batch).softmax(-1).sum(), batches)


def test_operators_are_on_the_curve_of_their_kind(program: Program):
    prices = costs(program)
    found = {node.operator.partition(".")[0]: kind_of(node, prices[node.name]) for node in program.nodes}
    expected = {
        "conv2d": "convolution",
        "layer_norm": "normalization",
        "scaled_dot_product_attention": "attention",
        "linear": "matmul",
        "gelu": "activation",
        "softmax": "softmax",
        "sum": "reduction",
        "transpose": "elementwise",
    }
    assert expected.items() <= found.items()


@pytest.mark.parametrize("name", sorted(KIND_OF))
@pytest.mark.every
def test_every_name_in_the_table_is_an_operator(name: str):
    assert hasattr(torch.ops.aten, name)


def test_the_seconds_are_those_of_work_over_rate(program: Program):
    """By hand: every rate of this machine is 1e9 and no call takes less than 1 us."""
    prices = costs(program)
    forward = backward = 0.0
    for node in program.nodes:
        cost, gradient = prices[node.name], any(each.requires_grad for each in node.outputs)
        moved, back = (
            cost.read_bytes + cost.written_bytes,
            cost.backward_read_bytes + cost.backward_written_bytes,
        )
        forward += max(1e-6, cost.flops / 1e9, moved / 1e9)
        backward += max(1e-6, cost.backward_flops / 1e9, back / 1e9) if gradient or back else 0.0
    found = program_seconds(program, prices, MACHINE)
    assert found.forward == pytest.approx(forward, rel=1e-6)
    assert found.backward == pytest.approx(backward, rel=1e-6)


def test_what_takes_no_gradient_has_no_backward(program: Program):
    frozen = capture_module(
        Net().requires_grad_(False),
        lambda model, batch: model(batch).sum(),
        (torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)),
    )
    assert program_seconds(frozen, costs(frozen), MACHINE).backward == 0.0
    view = next(node for node in program.nodes if node.operator.startswith("transpose"))
    assert node_seconds(view, Cost(), MACHINE).total == pytest.approx(2e-6)


def test_kinds_counted_in_flops_need_some(program: Program):
    for node in program.nodes:
        assert kind_of(node, Cost()) not in COUNTED_IN_FLOPS
