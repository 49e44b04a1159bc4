"""What an update depends on is known by the exact class, or said by the job; the list is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from meshloom.core.job import Job
from meshloom.optimizer.reach import ELEMENTWISE, PER_PARAMETER, added_to, reach
from meshloom.optimizer.user_optimizer import make_optimizers

REFUSED = {"LBFGS", "SparseAdam"}
WHOLE = {"Adafactor", "Muon"}
CLASSES = {
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
}
ALL = sorted(CLASSES - REFUSED)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(set(ALL) - WHOLE)),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"lr": torch.tensor(0.0)}),
    ("AdamW", {"lr": 0.0}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("ASGD", {"t0": 2.0}),
]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(3, 5))]


class Lamb(Optimizer):
    """Sign of the gradient, scaled by the norm of the parameter (a trust ratio)."""

    def __init__(self, params: Any, lr: float = 0.01, ratio: bool = True) -> None:
        super().__init__(params, {"lr": lr})
        self.ratio = ratio  # known to the instance alone

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad.sign() * group["lr"] * (each.norm() if self.ratio else 1.0))


class Together(Optimizer):
    """The step size comes from the norm over all parameters, and is kept in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([each.grad.norm() for each in group["params"] if each.grad is not None]).norm()
            group["scale"] = float(norm)
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["lr"] / norm)


class OwnList(Optimizer):
    """Keeps its own list of parameters, which a change of the groups does not reach."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.all = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.all:
            if each.grad is not None:
                each.sub_(each.grad * self.param_groups[0]["lr"])


class NeedsSome(Optimizer):
    """Elementwise, but fails when it holds no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch._foreach_sub_(group["params"], [each.grad * group["lr"] for each in group["params"]])
            assert torch.cat([each.reshape(-1) for each in group["params"]]).isfinite().all()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_optimizer_of_torch_is_on_a_list_but_lbfgs(name: str):
    """A class that torch adds belongs on one of them, or here."""
    known = {each.__name__ for each in (*ELEMENTWISE, *PER_PARAMETER)}
    assert (name in known) == (name != "LBFGS")
    assert (name in WHOLE) == (name in {each.__name__ for each in PER_PARAMETER})


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=[f"{name}-{'-'.join(settings)}" for name, settings in VARIANTS])  # fmt: skip
def test_slices_of_elementwise_ones_end_as_the_whole(name: str, settings: dict[str, Any]):
    """What the list says: an optimizer of slices, and one that holds the rest, do what one of whole parameters does."""
    whole = parameters()
    slices = [[nn.Parameter(each.detach().reshape(-1)[part].clone()) for each in whole] for part in (slice(0, 7), slice(7, None))]  # fmt: skip
    made: list[Any] = [getattr(torch.optim, name)(each, **settings) for each in (whole, *slices)]
    for scale in (1.0, 1e-3, 1e2, 30.0, 1.0):
        for number, each in enumerate(whole):
            each.grad = torch.randn(each.shape) * scale
            for part, where in zip(slices, (slice(0, 7), slice(7, None)), strict=True):
                part[number].grad = each.grad.reshape(-1)[where].clone()
        for each in made:
            each.step()
    for each, *parts in zip(whole, *slices, strict=True):
        assert torch.allclose(
            torch.cat(parts), each.reshape(-1), rtol=1e-6
        )  # foreach and fused kernels round otherwise


def test_the_exact_class_decides_and_the_job_says_it_for_others():
    class Mine(torch.optim.AdamW):
        pass

    assert reach(torch.optim.AdamW(parameters())) == "element"
    assert reach(torch.optim.Adafactor(parameters())) == "parameter"
    for unknown in (Mine(parameters()), Lamb(parameters())):
        assert reach(unknown) == "optimizer"
        assert reach(unknown, elementwise=True) == "element"
        assert reach(unknown, per_parameter=True) == "parameter"
    # what the job says is of those that are not known
    assert reach(torch.optim.AdamW(parameters()), per_parameter=True) == "element"
    assert reach(torch.optim.Muon(parameters()), elementwise=True) == "parameter"


def test_a_job_may_say_what_is_known():
    named = [("a", parameters()[0]), ("b", parameters()[1])]
    assert make_optimizers(job_of(torch.optim.AdamW, elementwise=True), named).reaches == ["element"]


def job_of(optimizer: Any, **settings: Any) -> Job:
    unused: Any = lambda *_: None  # noqa: E731
    return Job(model=unused, loss=unused, optimizer=optimizer, data=unused, batch_size=4, steps=1, **settings)


class Around(Optimizer):
    """A wrapper that has what its base has, and calls no `__init__`."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)


def test_a_wrapper_that_calls_no_init_is_one_whose_rule_is_unknown() -> None:
    optimizer = Around(torch.optim.AdamW(parameters()))
    assert reach(optimizer) == "optimizer" and not added_to(optimizer)
