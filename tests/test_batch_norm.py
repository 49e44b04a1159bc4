"""Synchronised batch norm is torch's own on the joined chunk: outputs, gradients and running statistics."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CollectiveError, JobError, TrainingError
from meshloom.replica.buffers.batch_norm import join_batch_norm, synchronise_batch_norm
from tests.covering import few

# Sums run per rank and then over ranks, instead of over all samples at once.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def model(seed: int, *layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(*layers).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def together(
    models: Sequence[nn.Module], inputs: Sequence[Tensor], steps: int = 1
) -> list[tuple[Tensor, Tensor | None]]:
    """Each rank's output and gradient of the input, of the sum of a loss that is not symmetric in the
    outputs."""
    groups = simulated_groups(len(models))

    def rank(number: int) -> tuple[Tensor, Tensor | None]:
        x = inputs[number].clone().requires_grad_(inputs[number].is_floating_point())
        for _ in range(steps):
            x.grad = None
            out = models[number](x)
            loss_of(out).backward()
        return out.detach(), x.grad

    with ExitStack() as stack:
        for each, group in zip(models, groups, strict=True):
            stack.enter_context(synchronise_batch_norm(each, group))
        return in_turns([lambda number=number: rank(number) for number in range(len(models))])


def loss_of(out: Tensor) -> Tensor:
    return (out**3 + torch.sin(out)).sum()


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(5), (5,)),
    "1d with length": (lambda: nn.BatchNorm1d(5), (5, 3)),
    "2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(2), (2, 3, 2, 2)),
    "not affine": (lambda: nn.BatchNorm1d(5, affine=False), (5,)),
    "cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 2, 2)),
    "untracked": (lambda: nn.BatchNorm1d(5, track_running_stats=False), (5,)),
    "large eps": (lambda: nn.BatchNorm1d(5, eps=0.5, momentum=0.7), (5,)),
}


@pytest.mark.parametrize("sizes", few([[5, 1, 2], [3, 3], [1, 1, 1, 1]]))
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.every
def test_equals_torch_on_the_joined_chunk(case: str, sizes: list[int]):
    build, shape = CASES[case]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, *shape, generator=generator, dtype=torch.float64) * 2 + 3 for size in sizes]
    models = [model(0, build(), nn.Tanh(), build()) for _ in sizes]
    results = together(models, inputs, steps=3)
    one = model(0, build(), nn.Tanh(), build())
    joined = torch.cat(inputs).requires_grad_()
    for _ in range(3):
        joined.grad = None
        out = one(joined)
        loss_of(out).backward()
    torch.testing.assert_close(torch.cat([output for output, _ in results]), out.detach(), **EXACT)
    torch.testing.assert_close(
        torch.cat([grad for _, grad in results if grad is not None]), joined.grad, **EXACT
    )
    for name, parameter in one.named_parameters():
        total = torch.stack([dict(each.named_parameters())[name].grad for each in models]).sum(0)  # type: ignore[arg-type]
        torch.testing.assert_close(total, parameter.grad, **EXACT)
    for name, buffer in one.named_buffers():
        mine = [dict(each.named_buffers())[name] for each in models]
        torch.testing.assert_close(mine[0], buffer, **EXACT)
        assert all(torch.equal(each, mine[0]) for each in mine)


def test_a_large_mean_loses_no_digits_in_float32():
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 3, 4, 4, generator=generator) + 1000 for size in (5, 2)]
    models = [nn.BatchNorm2d(3) for _ in inputs]
    results = together(models, inputs)
    one = nn.BatchNorm2d(3).double()
    expected = one(torch.cat(inputs).double())
    # The inputs themselves have 6e-5 of rounding at 1000.
    torch.testing.assert_close(
        torch.cat([output for output, _ in results]).double(), expected, rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(models[0].running_var.double(), one.running_var, rtol=1e-4, atol=0)  # type: ignore[union-attr]


def test_half_precision_inputs_keep_float32_statistics():
    inputs = [torch.randn(size, 3, 4, dtype=torch.float64).bfloat16() for size in (4, 2)]
    models = [nn.BatchNorm1d(3) for _ in inputs]
    results = together(models, inputs)
    assert all(
        output.dtype == torch.bfloat16 and grad is not None and grad.dtype == torch.bfloat16
        for output, grad in results
    )
    one = nn.BatchNorm1d(3)
    torch.testing.assert_close(
        torch.cat([output for output, _ in results]), one(torch.cat(inputs)), rtol=1e-2, atol=1e-2
    )
    torch.testing.assert_close(models[0].running_mean, one.running_mean)


def test_inputs_without_gradient_still_train_the_layer():
    models = [model(0, nn.BatchNorm1d(3)) for _ in range(2)]
    inputs = [torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)]
    with ExitStack() as stack:
        for each, group in zip(models, simulated_groups(2), strict=True):
            stack.enter_context(synchronise_batch_norm(each, group))
        in_turns(
            [
                lambda each=each, x=x: loss_of(each(x)).backward()
                for each, x in zip(models, inputs, strict=True)
            ]
        )
    one = model(0, nn.BatchNorm1d(3))
    loss_of(one(torch.cat(inputs))).backward()
    torch.testing.assert_close(
        models[0][0].weight.grad + models[1][0].weight.grad, one[0].weight.grad, **EXACT
    )


def test_a_rank_without_values_takes_part():
    models = [nn.BatchNorm1d(3).double() for _ in range(3)]
    inputs = [torch.randn(size, 3, dtype=torch.float64) for size in (4, 0, 2)]
    results = together(models, inputs)
    expected = nn.BatchNorm1d(3).double()(torch.cat(inputs))
    torch.testing.assert_close(torch.cat([output for output, _ in results]), expected, **EXACT)


def test_gradients_that_are_weighted_afterwards_are_of_the_joined_mean():
    """Of three ranks' means, which count 3, 1 and 0: the last one's rows are another rank's, once more."""
    inputs = [torch.randn(3, 4, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)]
    inputs.append(inputs[1].clone())
    weights, layers = (3 / 4, 1 / 4, 0.0), [model(0, nn.BatchNorm1d(4))[0] for _ in inputs]

    def rank(number: int) -> Tensor:
        x = inputs[number].clone().requires_grad_()
        (loss_of(layers[number](x)) / len(x)).backward()
        return x.grad * weights[number]

    for layer, group, weight in zip(layers, simulated_groups(3), weights, strict=True):
        assert join_batch_norm(layer, group, lambda x, weight=weight: weight) == [layer]
        assert join_batch_norm(layer, group, lambda x: 1.0) == []
    found = in_turns([lambda number=number: rank(number) for number in range(3)])
    one, joined = model(0, nn.BatchNorm1d(4))[0], torch.cat(inputs[:2]).requires_grad_()
    (loss_of(one(joined)) / 4).backward()
    torch.testing.assert_close(torch.cat(found[:2]), joined.grad, **EXACT)
    gradient = sum(each.weight.grad * weight for each, weight in zip(layers, weights, strict=True) if weight)
    torch.testing.assert_close(gradient, one.weight.grad, **EXACT)
    for each in layers:
        torch.testing.assert_close(each.state_dict(), one.state_dict(), **EXACT)


def test_copies_of_a_joined_layer_and_files_have_the_forward_of_its_class():
    layer, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    join_batch_norm(layer, simulated_groups(2)[0], lambda x: 1.0)
    plain = nn.BatchNorm1d(3)
    expected = plain(x)
    for each in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(copy.deepcopy(layer)),
    ):
        assert torch.equal(each(x), expected) and torch.equal(each.running_mean, plain.running_mean)
    assert layer.num_batches_tracked == 0


def test_evaluation_mode_communicates_nothing():
    layer = nn.BatchNorm1d(3).eval()
    x = torch.randn(4, 3)
    expected = layer(x)
    with synchronise_batch_norm(layer, simulated_groups(2)[0]):
        assert torch.equal(layer(x), expected)
        with pytest.raises(CollectiveError, match="rank 1"):
            layer.train()(x)


def test_the_module_is_unchanged_afterwards():
    layer = model(0, nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = [(name, type(each), sorted(vars(each))) for name, each in layer.named_modules()]
    keys = list(layer.state_dict())
    with synchronise_batch_norm(layer, simulated_groups(1)[0]):
        assert list(layer.state_dict()) == keys and type(layer[0]) is nn.BatchNorm1d
    assert [(name, type(each), sorted(vars(each))) for name, each in layer.named_modules()] == before


def test_a_layer_with_its_own_forward_is_refused():
    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * 2

    made = nn.Sequential(nn.ReLU(), Own(3))
    with (
        pytest.raises(JobError, match="1 is a Own with a forward of its own"),
        synchronise_batch_norm(made, simulated_groups(1)[0]),
    ):
        pass


def test_one_value_per_channel_is_an_error():
    with (
        pytest.raises(TrainingError, match="1 value"),
        synchronise_batch_norm(layer := nn.BatchNorm1d(3), simulated_groups(1)[0]),
    ):
        layer(torch.randn(1, 3))


def test_wrong_shapes_are_torchs_error():
    with (
        pytest.raises(ValueError, match="expected 4D"),
        synchronise_batch_norm(layer := nn.BatchNorm2d(3), simulated_groups(1)[0]),
    ):
        layer(torch.randn(1, 3))


# --- Cumulative averages.
