"""Habits of code: subclasses of tensors, own optimizers, parametrizations, counters and caches, prints, scripts, conditions on values."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

DATA = {"x": normal(431, 7), "y": integers(432, 5)}
CALLS = itertools.count()
STATISTICS: dict[str, list[float]] = {"loss": []}


def classify(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, 5))


class Named(Tensor):
    """A tensor with a tag that operations pass on, by `__torch_function__`."""

    tag: str = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        tags = [a.tag for a in args if isinstance(a, Named)]
        if isinstance(out, Named) and tags:
            out.tag = tags[0]
        return out


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 11), nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.as_subclass(Named)
        x.tag = "features"
        h = torch.relu(self.one(x))
        assert isinstance(h, Named) and h.tag == "features"
        return self.two(h).as_subclass(Tensor)


def subclass_of_tensor() -> Job:
    return job_of(Tagged, classify, DATA)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware: climbs, evaluates the closure again, and steps from where it was."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        norm = torch.norm(
            torch.stack(
                [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
            ),
            p=2,
        )
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        self.zero_grad()
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        return loss


def sharpness_aware() -> Job:
    make = lambda named: SAM([p for _, p in named], torch.optim.SGD, lr=0.05, momentum=0.9)  # noqa: E731
    return job_of(mlp, classify, DATA, optimizer=make)


class Lamb(torch.optim.Optimizer):
    """Trust ratios of layers, decay by groups, a state that is made when first stepped."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                bias1, bias2 = 1 - 0.9 ** group["step"], 1 - 0.99 ** group["step"]
                update = (m / bias1) / (v / bias2).sqrt().add_(1e-6)
                if group["weight_decay"]:
                    update.add_(p, alpha=group["weight_decay"])
                w_norm, g_norm = p.norm(2.0), update.norm(2.0)
                trust = torch.where(
                    w_norm > 0,
                    torch.where(g_norm > 0, w_norm / g_norm, torch.ones_like(w_norm)),
                    torch.ones_like(w_norm),
                )
                p.add_(update * trust.clamp(max=10.0), alpha=-group["lr"])


def _lamb(named: Any) -> torch.optim.Optimizer:
    decay = [p for _, p in named if p.ndim > 1]
    rest = [p for _, p in named if p.ndim <= 1]
    return Lamb([{"params": decay, "weight_decay": 0.01}, {"params": rest}])


def trust_ratios() -> Job:
    cycle = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=4, cycle_momentum=False)  # noqa: E731
    return job_of(mlp, classify, DATA, optimizer=_lamb, scheduler=cycle)


class Lookahead(torch.optim.Optimizer):
    """Wraps another; every second step the slow weights move and are copied back."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self._hook_for_profile = lambda: None
        for group in self.param_groups:
            group["k_counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["k_counter"] += 1
            if group["k_counter"] % self.k:
                continue
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = torch.clone(p.data).detach()
                slow = state["slow"]
                slow.add_(p.data - slow, alpha=self.alpha)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def look_ahead() -> Job:
    return job_of(
        mlp,
        classify,
        DATA,
        optimizer=lambda named: Lookahead(torch.optim.AdamW([p for _, p in named], lr=1e-2)),
    )


class LoRA(nn.Module):
    def __init__(self, outputs: int, inputs: int, rank: int = 2) -> None:
        super().__init__()
        self.a, self.b, self.enabled = (
            nn.Parameter(torch.randn(rank, inputs) * 0.3),
            nn.Parameter(torch.randn(outputs, rank) * 0.1),
            True,
        )

    def forward(self, w: Tensor) -> Tensor:
        return (
            w + torch.matmul(self.b, F.dropout(self.a, 0.1, self.training)).view(w.shape) * 0.5
            if self.enabled
            else w
        )


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _lora_model() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), weight_norm(nn.Linear(9, 5))
    )
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
        parametrize.register_parametrization(layer, "weight", LoRA(*layer.weight.shape))
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    return model


def low_rank_parametrizations() -> Job:
    return job_of(_lora_model, classify, DATA)


class Counts(nn.Module):
    """Counters of the module, of Python and global ones; caches on `self`; buffers registered in the forward; prints now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls, self.cache = nn.Linear(7, 11), nn.Linear(11, 5), 0, {}
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        next(CALLS)
        if not hasattr(self, "position"):
            self.register_buffer("position", torch.sin(torch.arange(11) * 0.3), persistent=False)
        key = (x.shape[-1], str(x.dtype))
        if key not in self.cache:
            self.cache[key] = torch.linspace(0.5, 1.5, x.shape[-1]).to(x)
        h = self.one(x * self.cache[key]) + self.position.to(x)
        h *= 0.9
        h.clamp_(-3, 3)
        h += h.mean(dim=-1, keepdim=True)
        self.history.append(h.abs().mean().item())
        if self.calls % 1000 == 999:
            print(f"activation {self.history[-1]:.3f}")
        self.features = h
        return self.two(torch.tanh_(h.clone()))


def _with_features(model: Any, b: Any) -> Tensor:
    loss = classify(model, b) + 1e-2 * model.features.pow(2).mean()
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"loss is {loss.item()}")
    STATISTICS["loss"].append(float(loss.detach()))
    return loss


def counters_and_caches() -> Job:
    return job_of(Counts, _with_features, DATA, batch_size=7)


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    fused_gelu = torch.jit.script(_gelu)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    class ScriptedCell(torch.jit.ScriptModule):
        """A recurrent cell whose loop is compiled."""

        def __init__(self, inputs: int, hidden: int) -> None:
            super().__init__()
            self.ih, self.hh = (
                nn.Parameter(torch.randn(hidden, inputs) * 0.3),
                nn.Parameter(torch.randn(hidden, hidden) * 0.3),
            )

        @torch.jit.script_method
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(x.size(0), self.hh.size(0), dtype=x.dtype)
            outs: list[Tensor] = []
            for t in range(x.size(1)):
                h = torch.tanh(x[:, t] @ self.ih.t() + h @ self.hh.t())
                outs += [h]
            return torch.stack(outs, 1)


class UsesScripts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.cell = ScriptedCell(3, 9)
        self.dense, self.bias, self.head = (
            nn.Linear(9, 11, bias=False),
            nn.Parameter(torch.zeros(11)),
            nn.Linear(11, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(fused_gelu(self.dense(self.cell(x)), self.bias).mean(1))


def scripted_functions_and_methods() -> Job:
    return job_of(UsesScripts, classify, {"x": normal(433, 6, 3), "y": DATA["y"]})


class Conditional(nn.Module):
    """`torch.cond` on a value; an early exit when all are sure; a switch of experts by the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.exits = nn.ModuleList([nn.Linear(9, 5) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        h = torch.tanh(self.one(x))
        outs = [self.exits[0](h)]
        h = torch.cond(h.mean() > 0, lambda h: torch.sin(h), lambda h: torch.tanh(h), (h,))
        if h.norm() > 2.0:
            h = h + torch.tanh(self.two(h))
        else:
            h = h - torch.tanh(self.three(h))
        outs.append(self.exits[1](h))
        if outs[-1].softmax(-1).max(-1)[0].min() < 0.99:
            outs.append(self.exits[2](h * torch.sigmoid(h)))
        return outs


def _all_exits(model: Any, b: Any) -> Tensor:
    outs = model(b["x"])
    return sum((i + 1) * F.cross_entropy(o, b["y"]) for i, o in enumerate(outs)) / len(outs)


def conditions_and_early_exits() -> Job:
    return job_of(Conditional, _all_exits, DATA)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        ctx.mark_non_differentiable(torch.zeros(1, dtype=torch.long))
        ctx.levels = levels
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clone(), None


class SphereGrad(torch.autograd.Function):
    """New style: `setup_context`, a gradient projected on the sphere's tangent."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.norm(dim=-1, keepdim=True)
        return x / n, n

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        y, n = output
        ctx.mark_non_differentiable(n)
        ctx.save_for_backward(y, n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        y, n = ctx.saved_tensors
        return (grad - (grad * y).sum(-1, keepdim=True) * y) / n


class FiniteScalar(nn.Module):
    """Codes by rounding within bounds of each channel, entropy of codes, and a sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = (
            nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3)),
            nn.Sequential(nn.Linear(3, 11), nn.ReLU(), nn.Linear(11, 7)),
        )
        self.register_buffer("basis", torch.tensor([1, 4, 16]), persistent=False)
        self.register_buffer("usage", torch.zeros(64, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        z, norm = SphereGrad.apply(self.enc(x))
        codes = RoundSTE.apply((z + 1) / 2, 3)
        index = ((codes * 3).round().long() * self.basis).sum(-1)
        self.usage.scatter_add_(0, index, torch.ones_like(index))
        out = self.dec(codes * 2 - 1)
        assert out.shape == x.shape, (out.shape, x.shape)
        return F.smooth_l1_loss(out, x, beta=0.5) + 0.0 * norm.mean()


def finite_scalar_quantisation() -> Job:
    return job_of(FiniteScalar, lambda m, b: m(b["x"]), DATA)
