"""Habits of code: what goes in and out of modules, what they keep, how they are wrapped, watched, timed and guarded."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
import types
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

DATA = {"x": normal(501, 6), "y": integers(502, 5)}
logger = logging.getLogger(__name__)
logger.setLevel(logging.CRITICAL)


def classify(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


@dataclass
class Output:
    """As `transformers.utils.ModelOutput` is: by attribute, by key, and as a tuple."""

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: int | str) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(v for v in (self.loss, self.logits, self.hidden_states) if v is not None)


State = namedtuple("State", ["h", "c"])


class Step(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.norm = nn.LSTMCell(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if state is None:
            zeros = x.new_zeros(x.size(0), self.cell.hidden_size)
            state = State(zeros, zeros)
        h, c = self.cell(x, (state.h, state.c))
        return self.norm(h), state._replace(h=h, c=c)


class Records(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.steps, self.head = nn.Linear(6, 9), nn.ModuleList([Step(9), Step(9)]), nn.Linear(9, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Output:
        kept: list[Tensor] = []
        states: dict[int, State] = {}
        h = self.proj(x)
        for _ in range(3):
            for i, step in enumerate(self.steps):
                h, states[i] = step(h, states.get(i))
            if kwargs.get("output_hidden_states", False):
                kept.append(h)
        logits = self.head(h)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return Output(logits=logits, loss=loss, hidden_states=tuple(kept), extra={"turns": 3})


def _records_loss(model: Any, b: Any) -> Tensor:
    out = model(b["x"], labels=b["y"], output_hidden_states=True)
    loss, logits, hidden = out[0], out["logits"], out.hidden_states
    return loss + 1e-3 * logits.square().mean() + 1e-2 * sum(h.square().mean() for h in hidden) / len(hidden)


def dataclass_out_and_states_in_tuples() -> Job:
    return job_of(Records, _records_loss, DATA)


class Wrapper:
    """Not a module: hands attributes on, as accelerators and loggers wrap models."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["_wrapped"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)


class Delegating(nn.Module):
    """A module that finds what it lacks in the module that it wraps, with properties on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict(
            {"enc": nn.Linear(6, 8), "mid": weight_norm(nn.Linear(8, 8)), "dec": nn.Linear(8, 5)}
        )
        self._scale = nn.Parameter(torch.zeros(()))
        self.ops: list[Callable[[Tensor], Tensor]] = [
            functools.partial(F.leaky_relu, negative_slope=0.1),
            torch.tanh,
        ]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__["_modules"]["module"]
            if name in modules:
                return modules[name]
            raise

    @property
    def scale(self) -> Tensor:
        return self._scale.exp()

    @functools.cached_property
    def depth(self) -> int:
        return sum(isinstance(m, nn.Linear) for m in self.modules())

    def forward(self, x: Tensor) -> Tensor:
        h = self.enc(x) * self.scale
        for op in self.ops:
            h = op(self.mid(h)) / self.depth
        return self.dec(h)


def attributes_handed_on() -> Job:
    return job_of(Delegating, lambda m, b: classify(Wrapper(m), b), DATA)


class Timer:
    totals: dict[str, float] = defaultdict(float)  # noqa: RUF012

    @classmethod
    @contextlib.contextmanager
    def measure(cls, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            cls.totals[name] += time.perf_counter() - start


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with Timer.measure(function.__qualname__):
            return function(*args, **kwargs)

    return inner


class Timed(nn.Module):
    """Times itself, warns once, logs at times, and guards against what cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OrderedDict(one=nn.Linear(6, 10), act=nn.SiLU(), two=nn.Linear(10, 5)))
        self.metrics: dict[str, Any] = {}
        self._warned, self.started = False, time.monotonic()

    @timed
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, f"expected [batch, features], got {tuple(x.shape)}"
        if not self._warned:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("this model is experimental", stacklevel=2)
            self._warned = True
        for name, block in self.blocks.named_children():
            with Timer.measure(name):
                x = block(x)
            self.metrics[f"{name}/rms"] = x.detach().pow(2).mean().sqrt().item()
            self.metrics[f"{name}/time"] = time.monotonic() - self.started
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("rms %s", self.metrics)
        if not torch.isfinite(x).all():
            raise FloatingPointError("logits are not finite")
        return x


def timed_and_watched() -> Job:
    return job_of(Timed, classify, DATA, batch_size=7)


class Fallback(nn.Module):
    """Fast paths that are tried, and what is done where they fail."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o, self.head = (
            nn.Linear(4, 8),
            nn.Linear(4, 16),
            nn.Linear(8, 4),
            nn.Linear(4, 5),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            import flash_attention_of_nobody  # type: ignore[import-not-found]

            return flash_attention_of_nobody.attend(q, k, v)
        except ImportError:
            pass
        try:
            return F.scaled_dot_product_attention(q, k, v.view(1, 2, 3))
        except RuntimeError:
            return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, t, 8))
        return self.head(x.amax(1))


def fast_paths_that_fail() -> Job:
    return job_of(Fallback, classify, {"x": normal(503, 5, 4), "y": DATA["y"]})


class Stream(nn.Module):
    """Layers as a generator yields them; a recursion; a closure over a running value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.gates, self.head = nn.ParameterList([torch.zeros(6) for _ in range(4)]), nn.Linear(6, 5)

    def outputs(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        for i, (layer, gate) in enumerate(zip(self.layers, self.gates, strict=True)):
            x = torch.lerp(x, torch.tanh(layer(x)), torch.sigmoid(gate))
            yield i, x

    def fold(self, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        middle = len(parts) // 2
        return torch.maximum(self.fold(parts[:middle]), self.fold(parts[middle:])) * 0.9

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty: Tensor | float = 0.0

        def note(h: Tensor) -> Tensor:
            nonlocal penalty
            penalty = penalty + h.abs().mean()
            return h

        parts = [note(h) for i, h in self.outputs(x) if i % 2 == 1]
        return self.head(self.fold(parts)), penalty


def _penalised(model: Any, b: Any) -> Tensor:
    logits, penalty = model(b["x"])
    return F.cross_entropy(logits, b["y"]) + 0.1 * penalty


def generators_and_closures() -> Job:
    return job_of(Stream, _penalised, DATA)


class Kind(Enum):
    RELU = "relu"
    GELU = "gelu"


class Picked(nn.Module):
    """A head for each task, by a string that travels with the batch; copies of one block that differ later."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kinds = nn.Linear(6, 8), {Kind.RELU: F.relu, Kind.GELU: F.gelu}
        block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.blocks = nn.ModuleList([copy.deepcopy(block) for _ in range(2)])
        with torch.no_grad():
            for i, each in enumerate(self.blocks):
                for p in each.parameters():
                    p.mul_(1 + 0.1 * i).add_(0.01)
        self.heads = nn.ModuleDict({"small": nn.Linear(8, 3), "large": nn.Linear(8, 5)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        h = self.body(x)
        for kind, block in zip(Kind, self.blocks, strict=True):
            h = h + self.kinds[kind](block(h))
        return self.heads[task](h)


def _by_task(model: Any, b: Any) -> Tensor:
    total = torch.zeros((), dtype=b["x"].dtype)
    for task in sorted(set(b["task"])):
        rows = torch.tensor([t == task for t in b["task"]])
        logits = model(b["x"][rows], task)
        total = total + F.cross_entropy(logits, b["y"][rows] % logits.size(1), reduction="sum")
    return total / len(b["task"])


def heads_by_a_string_of_the_batch() -> Job:
    samples = [
        {"x": DATA["x"][i], "y": DATA["y"][i], "task": ("small", "large", "large")[i % 3]} for i in range(24)
    ]
    return job_of(Picked, _by_task, samples)


class StraightThrough(torch.autograd.Function):
    """With a number, a string and a switch among its arguments, and a gradient clipped by them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, mode: str = "floor", clip: bool = True) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limits = (-1.0, 1.0) if clip else None
        levels = 2**bits - 1
        return {"floor": torch.floor, "round": torch.round}[mode](x.clamp(-1, 1) * levels) / levels

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad = grads[0].clone()
        if ctx.limits is not None:
            low, high = ctx.limits
            grad[(x < low) | (x > high)] = 0
        return grad, None, None, None


class Quantised(nn.Module):
    """Weights written through `.data`, running scales, guards against nan, in-place arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 9, bias=False), nn.Linear(9, 5)
        self.register_buffer("scale", torch.ones(9))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if self.training:
            with torch.no_grad():
                self.scale.data.mul_(0.9).add_(h.detach().abs().amax(0), alpha=0.1)
        h = h / self.scale.clamp_min(1e-3)
        h = StraightThrough.apply(h, 3, "round") + StraightThrough.apply(h * 0.5, 2, "floor", False)
        safe = torch.where(h > 0, h, torch.ones_like(h))
        h = torch.where(h > 0, torch.log(safe), h.expm1())
        h.mul_(0.5).add_(0.1).nan_to_num_(0.0)
        h[:, ::2] *= 2
        h[h.abs() > 3] = 0
        return self.two(h) if self.absent is None else self.absent


def functions_with_plain_arguments() -> Job:
    return job_of(Quantised, classify, DATA)


def _double(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] * 2, *args[1:])


class Patched(nn.Module):
    """Forwards that are replaced at run time, hooks that change values and some that are removed, by `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        self.net[0].register_forward_pre_hook(_double)
        removed = self.net[2].register_forward_hook(lambda m, i, o: o * 100)
        removed.remove()
        self.net[2].register_forward_hook(lambda m, i, o: o + i[0].mean(-1, keepdim=True))
        original = self.net[4].forward

        def forward(layer: nn.Linear, x: Tensor) -> Tensor:
            return original(x) + 0.1 * F.linear(x, layer.weight.roll(1, 0))

        self.net[4].forward = types.MethodType(forward, self.net[4])
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def patched_forwards_and_hooks() -> Job:
    return job_of(Patched, classify, DATA)


class Seeded(nn.Module):
    """Draws under a seed of its own, in a forked state, whatever else is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 8), nn.Linear(8, 5), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            projection = torch.randn(8, 8, dtype=x.dtype)
        h = torch.tanh(self.drop(self.one(x)))
        return self.two(h + 0.1 * h @ projection)


def a_seed_of_its_own() -> Job:
    return job_of(Seeded, classify, DATA)
