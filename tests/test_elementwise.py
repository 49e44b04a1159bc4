"""The trial answers right for every optimizer of torch, for user-made ones, and leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from meshloom.optimizer.elementwise import is_elementwise, reach

REFUSED = {"LBFGS", "SparseAdam"}
WHOLE = {"Adafactor", "Muon"}
CLASSES = {
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
}
ALL = sorted(CLASSES - REFUSED)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
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


class Wrapper(Optimizer):
    """Wraps another optimizer and shares its groups; every second step moves half way back."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.calls = 0
        super().__init__([{"params": [nn.Parameter(torch.zeros(()))]}], {})
        self.param_groups = inner.param_groups
        self.state = inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        before = [each.clone() for group in self.param_groups for each in group["params"]]
        self.inner.step()
        if self.calls % 2 == 0:
            for each, kept in zip(
                (each for group in self.param_groups for each in group["params"]), before, strict=True
            ):
                each.lerp_(kept, 0.5)


class NeedsSome(Optimizer):
    """Elementwise, but fails when it holds no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch._foreach_sub_(group["params"], [each.grad * group["lr"] for each in group["params"]])
            assert torch.cat([each.reshape(-1) for each in group["params"]]).isfinite().all()


class Noisy(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.randn_like(each) * group["lr"])


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_of_torch_is_judged_right(name: str):
    optimizer = getattr(torch.optim, name)(parameters())
    assert is_elementwise(optimizer) == (name not in WHOLE)
    assert reach(optimizer) == ("parameter" if name in WHOLE else "element")


@pytest.mark.parametrize(
    ("name", "settings"), VARIANTS, ids=[f"{name}-{'-'.join(settings)}" for name, settings in VARIANTS]
)
def test_settings_do_not_confuse_the_trial(name: str, settings: dict[str, Any]):
    optimizer = getattr(torch.optim, name)(parameters(), **settings)
    assert is_elementwise(optimizer)
    optimizer.step()


def test_parameters_of_any_number_of_dims():
    shapes = [(), (3,), (2, 3), (4, 2, 3, 3), (1, 2, 3, 4, 5)]
    assert is_elementwise(
        torch.optim.AdamW([{"params": [nn.Parameter(torch.randn(shape))]} for shape in shapes])
    )
    assert not is_elementwise(torch.optim.Adafactor([nn.Parameter(torch.randn(7))]))


def test_a_trust_ratio_is_not_elementwise_and_an_attribute_switches_it_off():
    assert reach(Lamb(parameters())) == "parameter"
    assert reach(Lamb(parameters(), ratio=False)) == "element"


def test_what_looks_at_all_parameters_is_neither():
    assert reach(Together(parameters())) == "optimizer"


def test_what_does_not_follow_its_groups_is_found_out():
    assert reach(OwnList(parameters())) == "optimizer"


def test_what_fails_on_a_rank_without_parameters_is_found_out():
    assert reach(NeedsSome(parameters())) == "optimizer"


def test_random_updates_are_not_elementwise():
    assert reach(Noisy(parameters())) != "element"


def test_a_wrapper_is_judged_by_what_it_wraps():
    assert reach(Wrapper(torch.optim.SGD(parameters(), lr=0.1))) == "element"
    assert reach(Wrapper(torch.optim.Adafactor(parameters()))) == "parameter"


def test_a_wrapper_is_judged_alike_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """There torch asks a copied optimizer for a setting that Adafactor has not."""
    stream = SimpleNamespace(is_capturing=lambda: False)
    for module, name, found in (
        (torch.cuda, "is_available", True),
        (torch.cuda, "is_current_stream_capturing", False),
        (torch.accelerator, "current_accelerator", torch.device("cuda")),
        (torch.accelerator, "current_stream", stream),
    ):
        monkeypatch.setattr(module, name, lambda found=found, **_: found)
    assert reach(Wrapper(torch.optim.Adafactor(parameters()))) == "parameter"


def test_one_group_that_is_not_elementwise_decides():
    mine = parameters()

    class Mixed(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    each.sub_(each.grad * group["lr"] / (each.grad.norm() if group["normed"] else 1.0))

    assert is_elementwise(Mixed([{"params": mine, "normed": False}], {"lr": 0.1}))
    assert (
        reach(
            Mixed([{"params": mine[:1], "normed": False}, {"params": mine[1:], "normed": True}], {"lr": 0.1})
        )
        == "parameter"
    )


def test_the_users_answer_overrides_the_trial():
    assert reach(Lamb(parameters()), elementwise=True) == "element"
    assert reach(torch.optim.AdamW(parameters()), elementwise=False) == "parameter"


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "Muon", "SGD"])
def test_the_trial_leaves_no_trace(name: str):
    mine = parameters()
    optimizer = getattr(torch.optim, name)(mine)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    values = [each.detach().clone() for each in mine]
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = {
        id(key): {name: value.clone() for name, value in each.items()}
        for key, each in optimizer.state.items()
    }
    draws = torch.get_rng_state()
    reach(optimizer)
    assert torch.equal(draws, torch.get_rng_state())
    assert all(
        torch.equal(each, value) and each.grad is None for each, value in zip(mine, values, strict=True)
    )
    assert groups == [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    assert [each is other for each, other in zip(optimizer.param_groups[0]["params"], mine, strict=True)] == [
        True,
        True,
    ]
    assert state.keys() == {id(key) for key in optimizer.state}
    assert all(
        torch.equal(value, optimizer.state[each][name])
        for each in optimizer.state
        for name, value in state[id(each)].items()
    )
    assert not called and scheduler.last_epoch == 0
