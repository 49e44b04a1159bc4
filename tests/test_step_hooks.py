"""Hooks around an optimizer's step, and a step in its place, may look at all parameters, unless the job says otherwise."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import meshloom as ml
from meshloom.core.errors import JobError
from meshloom.optimizer.reach import is_known, reach
from meshloom.replica.replica_state import full_state
from tests.test_reach import parameters

QUIET = ml.Listener(started=str, note=str)


def clamp(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.data.clamp_(-0.4, 0.4)


def clip(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.05)


def before(hook: Callable[..., None]) -> Optimizer:
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook)
    return optimizer


def after(hook: Callable[..., None]) -> Optimizer:
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_step_post_hook(hook)
    return optimizer


def replaced(optimizer: Any) -> Optimizer:
    own = optimizer.step

    def step(closure: Any = None) -> Any:
        clip(optimizer)
        return own(closure)

    optimizer.step = step
    return optimizer


def test_hooks_and_a_step_in_its_place_may_look_at_all():
    for made in (before(clip), after(clamp), replaced(SGD(parameters(), lr=0.1))):
        assert reach(made) == "optimizer" and not is_known(made)
        assert reach(made, elementwise=True) == "element"


def test_a_method_below_a_schedulers_is_seen():
    optimizer: Any = SGD(parameters(), lr=0.1)
    own: Any = SGD.step

    def step(self: Optimizer, closure: Any = None) -> Any:
        clip(self)
        return own(self, closure)

    optimizer.step = types.MethodType(step, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert reach(optimizer) == "optimizer"
    plain = SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(plain, 3)
    assert reach(plain) == "element"


def clipped(named: Any) -> Optimizer:
    optimizer = SGD(named, lr=0.5)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def replacing(named: Any) -> Optimizer:
    return replaced(SGD(named, lr=0.5))


def numbers() -> Any:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 7, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.sin(x @ torch.randn(7, 3, generator=generator)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def job(optimizer: Callable[[Any], Optimizer]) -> ml.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3))

    return ml.Job(model=model, loss=loss, optimizer=optimizer, data=numbers, batch_size=10, steps=4)


def trained(optimizer: Callable[[Any], Optimizer], plan: str) -> dict[str, Tensor]:
    with ml.Trainer(
        job(optimizer), plan, devices="simulated", dtype=torch.float64, listener=QUIET
    ) as trainer:
        trainer.fit()
        return trainer.together(full_state)[0]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [clipped, replacing])
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "tp=2"])
@pytest.mark.covering("clipped", "dp=2,zero=1")
def test_a_norm_of_all_gradients_is_that_of_one_device(optimizer: Callable[[Any], Optimizer], plan: str):
    """Each rank's hook saw the rank's slices alone, and clipped by their norm."""
    one, ours = trained(optimizer, "dp=1"), trained(optimizer, plan)
    assert all(torch.allclose(ours[name], each, rtol=1e-9, atol=1e-12) for name, each in one.items())


@pytest.mark.long
def test_where_no_rank_has_all_parameters_it_is_refused():
    with pytest.raises(
        JobError,
        match="SGD with step hooks is not one whose rule is known, so it gets all parameters, and with pp=2 no rank has them all. Job",
    ):
        trained(clipped, "pp=2,cuts=2")
