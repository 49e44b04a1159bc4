"""Fake tensors on a CPU are what its operators give: strides of batch norm, workspaces of recurrent layers;
against the operators themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from meshloom.program.capture.capture import capture_module
from meshloom.program.run.execute import run_program
from meshloom.program.trace.on_cpu import AsOnCPU, workspace_bytes

aten = torch.ops.aten

pytestmark = pytest.mark.long  # the first fake tensor of a process takes seconds

LAYOUTS = {
    "plain": torch.zeros(6, 4),
    "transposed": torch.zeros(4, 6).t(),
    "sequence": torch.zeros(6, 4, 5),
    "sequence, transposed": torch.zeros(6, 5, 4).transpose(1, 2),
    "sequence of one": torch.zeros(6, 1, 4).transpose(1, 2),
    "sequence, every second": torch.zeros(6, 4, 10)[:, :, ::2],
    "picture": torch.zeros(6, 4, 5, 3),
    "picture, channels last": torch.zeros(6, 4, 5, 3).to(memory_format=torch.channels_last),
    "picture, turned": torch.zeros(6, 4, 5, 3).transpose(2, 3),
    "picture, batch inside": torch.zeros(4, 6, 5, 3).transpose(0, 1),
    "volume, channels last": torch.zeros(6, 4, 5, 3, 2).to(memory_format=torch.channels_last_3d),
    "volume, turned": torch.zeros(6, 4, 5, 3, 2).transpose(2, 4),
    "expanded": torch.zeros(6, 4, 1).expand(6, 4, 5),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.every
def test_strides_of_batch_norm(layout: str, training: bool):
    def normed(x: Tensor) -> Tensor:
        mean, variance, weight, bias = (torch.ones(4) for _ in range(4))
        return F.batch_norm(x, mean, variance, weight.requires_grad_(), bias, training=training)

    def steps(x: Tensor) -> list[tuple[int, int]]:
        # that of a single element says nothing
        return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]

    x = LAYOUTS[layout]
    with FakeTensorMode(), AsOnCPU():
        fake = normed(torch.empty_strided(x.shape, x.stride()))
    real = normed(x)
    assert (steps(fake), fake.dtype) == (steps(real), real.dtype)


@pytest.mark.usefixtures("silent_export")
def test_strides_in_a_program_are_those_of_its_run():
    # Where masks are drawn in the order of memory, a part of a mask is cut by them.
    model, batch = nn.BatchNorm1d(4), torch.randn(6, 5, 4)
    program = capture_module(
        model, lambda model, batch: F.dropout(model(batch.transpose(1, 2)), 0.5).sum(), (batch, batch + 1)
    )
    found = {node.operator: node.outputs[0].stride for node in program.nodes}
    assert found["batch_norm"] == found["dropout"] == model(batch.transpose(1, 2)).stride() == (20, 5, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(5, 3, 7, 5), (33, 17, 100, 90), (50, 8, 60, 60), (7, 8, 256, 64), (9, 2, 64, 256), (1, 1, 1, 1)],
)
def test_workspace_of_a_recurrent_layer(shape: tuple[int, int, int, int], dtype: torch.dtype):
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no such kernel for this processor: layers in bfloat16 take others")
    length, batch, features, hidden = shape
    weights = [torch.zeros(4 * hidden, each, dtype=dtype) for each in (features, hidden)] + [
        torch.zeros(4 * hidden, dtype=dtype)
    ] * 2
    state = torch.zeros(1, batch, hidden, dtype=dtype)
    x = torch.zeros(length, batch, features, dtype=dtype)
    workspace = aten.mkldnn_rnn_layer(
        x, *weights, state, state.clone(), False, [], 2, hidden, 1, True, False, False, True
    )[3]
    assert (
        workspace_bytes(length, batch, features, hidden=hidden, itemsize=dtype.itemsize)
        == workspace.untyped_storage().nbytes()
    )


@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_convolution_of_a_viewed_sequence_lies_as_it_does_when_it_runs(num_samples: int):
    """Views give dims of one element strides by which kernels choose: of a single sample the fake had
    channels last, and masks were drawn in that order."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        picture = batch.permute(0, 2, 1).view(num_samples, 6, 4, 4)
        return F.dropout(model(picture), 0.5).square().mean()

    model, batch = nn.Conv2d(6, 5, 3, padding=1), torch.randn(num_samples, 16, 6)
    program = capture_module(model, loss, (batch, batch + 1))
    found: dict[str, tuple[int, ...]] = {}
    run_program(
        program,
        dict(model.named_parameters()),
        {},
        batch,
        visit=lambda node, value: found.setdefault(node.name, value.stride()),
    )
    assert {"view", "conv2d", "dropout"} <= {node.operator for node in program.nodes}
    for node in program.nodes:
        assert node.outputs[0].stride == found[node.name], node.operator


def test_batch_norm_of_one_sample_may_have_wrong_gradients_in_torch():
    """Why programs give such gradients the order of the sample in memory (`test_single_samples.py`): where this no longer holds, they need not."""
    x, gradient = torch.randn(1, 2, 3, 3, dtype=torch.float64), torch.randn(1, 2, 3, 3, dtype=torch.float64)
    viewed = gradient.reshape(1, 2, 9).transpose(1, 2).contiguous().transpose(1, 2).reshape(1, 2, 3, 3)
    found: list[Tensor] = []
    for each in (gradient, viewed):
        leaf = x.clone().requires_grad_()
        found += torch.autograd.grad(F.batch_norm(leaf, None, None, training=True), leaf, each)
    assert torch.equal(gradient, viewed)
    assert not torch.allclose(*found)
