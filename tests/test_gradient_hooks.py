"""Hooks on gradients see what the loss of one device that runs the chunks one after another gives them: the gradient of
the chunk's share of the mean over the batch, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.train.trainer import Trainer
from tests.opaque_jobs import WIDTH, Net, Readable, equal, job_of

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]
LIMIT = 1e-3
Hook = Callable[[Tensor], Tensor | None]


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def sign(gradient: Tensor) -> Tensor:
    return 0.01 * gradient.sign()


def clip(gradient: Tensor) -> Tensor:
    return gradient * (LIMIT / (gradient.norm() + 1e-9)).clamp(max=1.0)


class Hooked(nn.Module):
    """A layer whose output's gradient goes through a hook."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.linear, self.hook = nn.Linear(WIDTH, WIDTH), hook

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return x + torch.tanh(y)


def on_tensor(hook: Hook) -> nn.Module:
    return Net([Hooked(hook)])


def on_parameters(hook: Hook) -> nn.Module:
    model = Net([Readable()])
    for parameter in model.parameters():
        parameter.register_hook(hook)
    return model


def on_module(hook: Hook) -> nn.Module:
    part = Readable()
    part.up.register_full_backward_hook(lambda module, given, taken: tuple(map(hook, given)))  # type: ignore[arg-type]
    return Net([part])


def before_module(hook: Hook) -> nn.Module:
    part = Readable()
    part.up.register_full_backward_pre_hook(lambda module, taken: tuple(map(hook, taken)))  # type: ignore[arg-type]
    return Net([part])


PLACES = {each.__name__: each for each in (on_tensor, on_parameters, on_module, before_module)}


@pytest.mark.long
@pytest.mark.covering("clamp-before_module", "sign-on_module", "clip-on_parameters", "clip-on_tensor")
@pytest.mark.parametrize("place", sorted(PLACES))
@pytest.mark.parametrize("hook", [clamp, sign, clip])
def test_hooks_that_are_not_linear_equal_one_device_under_dp(place: str, hook: Hook) -> None:
    assert equal(job_of(lambda: PLACES[place](hook)), "dp=2,microbatches=3")


@pytest.mark.slow
def test_a_hook_that_is_not_linear_equals_one_device_in_programs() -> None:
    assert equal(job_of(lambda: PLACES["on_tensor"](clamp)), "pp=2,microbatches=2")


@pytest.mark.parametrize("plan", ["dp=2", "tp=2,microbatches=2", "microbatches=2"])
def test_hooks_after_accumulation_are_refused_where_a_step_accumulates(plan: str) -> None:
    """They ended in tracebacks."""

    def build() -> nn.Module:
        model = Net([Readable()])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: None)
        return model

    with pytest.raises(JobError, match="has a hook that runs once its gradient is accumulated"):
        Trainer(job_of(build), plan, devices="simulated")
    Trainer(job_of(build), "dp=1", devices="simulated").close()


def test_hooks_on_activations_see_the_gradients_of_the_whole_batch() -> None:
    """A clamp of each element gives the same in chunks as in one, as a plain loop computes it."""

    def gradients(plan: str) -> dict[str, Tensor]:
        with Trainer(job_of(lambda: on_tensor(clamp)), plan, devices="simulated") as trainer:
            batch = next(iter(trainer.batches()))
            trainer.step(batch)
            return {
                name: each.detach().clone() for name, each in trainer.replicas[0].model.named_parameters()
            }

    plain, chunked = gradients("dp=1"), gradients("dp=2,microbatches=2")
    for name, each in plain.items():
        torch.testing.assert_close(chunked[name], each, rtol=1e-5, atol=1e-6)  # sum order differs


class Piling(nn.Module):
    """A layer that puts one more hook on its weight in every forward. after: accumulation."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(WIDTH, WIDTH), after

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            self.linear.weight.register_post_accumulate_grad_hook(lambda each: None)
        else:
            self.linear.weight.register_hook(lambda gradient: 0.5 * gradient)
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize(
    ("plan", "after"),
    [("dp=2", False), ("dp=2", True), ("dp=2,zero=3", False), ("microbatches=2", True)],
)
@pytest.mark.slow
def test_hooks_that_pile_up_are_refused_where_a_step_has_several_chunks(plan: str, after: bool) -> None:
    """On one device the second chunk has one more than the first. Verification said that a gradient is multiplied by a wrong number."""
    said = r"linear.weight has \d more hooks? after its chunks' forwards and backwards than before.* Register it once"
    with (
        Trainer(job_of(lambda: Net([Piling(after)])), plan, devices="simulated") as trainer,
        pytest.raises(JobError, match=said),
    ):
        trainer.step(next(iter(trainer.batches())))


@pytest.mark.long
def test_a_hook_that_each_backward_removes_may_be_put_in_each_forward() -> None:
    class Once(Piling):
        def forward(self, x: Tensor) -> Tensor:
            handle = self.linear.weight.register_hook(lambda gradient: handle.remove() or 0.5 * gradient)
            return x + torch.tanh(self.linear(x))

    assert equal(job_of(lambda: Net([Once(False)])), "dp=2,microbatches=2")
