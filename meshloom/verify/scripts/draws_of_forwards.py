"""What makes a forward of shares another one than of the whole batch: draws, dropout, statistics of a batch, lower precision."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshloom.verify.reference.observers import CastWatch, generators_now
from meshloom.verify.scripts.recorder import replaced

_DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(kw_only=True)
class ForwardNotes:
    """draws: whether a forward in training has moved a generator. lowered: precisions below the parameters' that are computed
    in. batch_norms: modules that normalize by the statistics of their batch. weighs: whether a module's calls count by `parallel(weight=...)`."""

    draws: bool = False
    lowered: list[str] = field(default_factory=list[str])
    batch_norms: list[str] = field(default_factory=list[str])
    weighs: bool = False

    def watch(self, module: nn.Module, precision: torch.dtype) -> None:
        """Note what this module's forwards do from now on."""
        _WATCHED[module] = self, precision, []
        module.register_forward_pre_hook(_before_noted)
        module.register_forward_hook(_after_noted, always_call=True)


# Hooks are functions of this file, so that a file or a copy of a module has them, too. A copy is not watched.
_WATCHED: Any = weakref.WeakKeyDictionary()  # module -> its notes, their precision, and forwards in progress
_FORWARDS = [0]  # in progress, of modules without draws


def _before_noted(module: nn.Module, *_: object) -> None:
    if module in _WATCHED:
        _, precision, inside = _WATCHED[module]
        watch = CastWatch(precision)
        inside.append((generators_now(_device(module)), watch))
        watch.__enter__()


def _after_noted(module: nn.Module, *_: object) -> None:
    if module in _WATCHED:
        notes, _, inside = _WATCHED[module]
        drawn, watch = inside.pop()
        watch.__exit__(None, None, None)
        if torch.is_grad_enabled():
            norms = [
                name
                for name, each in module.named_modules()
                if isinstance(each, _BATCH_NORMS) and each.training
            ]
            notes.draws |= drawn != generators_now(_device(module))
            notes.lowered = sorted({*notes.lowered, *(each.dtype for each in watch.casts)})
            notes.batch_norms = sorted({*notes.batch_norms, *norms})


def no_draws_within(module: nn.Module) -> None:
    """In `without_draws`, forwards of this module, and of copies of it, draw nothing."""
    module.register_forward_pre_hook(_enter, prepend=True)
    module.register_forward_hook(_leave, always_call=True)


def _enter(*_: object) -> None:
    _FORWARDS[0] += 1


def _leave(*_: object) -> None:
    _FORWARDS[0] -= 1


@contextmanager
def without_draws() -> Iterator[None]:
    """A context in which torch's dropout leaves what it is given, in modules and functions alike, and what forwards draw by functions of torch and numpy is
    the same number for each element: half a deviation above the mean of a normal, the middle of an interval, the likelier side, the likeliest places, the
    lowest integer."""

    def leaves(_: Any) -> Any:
        return lambda x=None, *args, **kwargs: kwargs.get("input", x)

    def attends(attention: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("dropout_p", None)
            return attention(*args[:4], *[0.0 for _ in args[4:5]], *args[5:], **kwargs)

        return attend

    def recurrent(init: Any) -> Any:
        def made(self: nn.RNNBase, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.dropout = 0.0

        return made

    def fixed(constant: Any) -> Any:
        def within(draw: Any) -> Any:
            def drawn(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
                if _FORWARDS[0]:
                    return constant(*args, **kwargs)
                return (
                    draw(*args, **kwargs) if generator is None else draw(*args, generator=generator, **kwargs)
                )

            return drawn

        return within

    with ExitStack() as stack:
        for owner, name in ((functional, name) for name in _DROPOUT):
            stack.enter_context(replaced(owner, name, leaves))
        stack.enter_context(replaced(torch, "dropout", leaves))
        stack.enter_context(replaced(functional, "scaled_dot_product_attention", attends))
        stack.enter_context(replaced(nn.RNNBase, "__init__", recurrent))
        for owner, constants in ((torch, _CONSTANTS), (Tensor, _IN_PLACE), (numpy.random, _OF_NUMPY)):
            for name, constant in constants.items():
                stack.enter_context(replaced(owner, name, fixed(constant)))
        yield


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    return mean + 0.5 * std if size is None else torch.zeros(size, **kwargs) + (mean + 0.5 * std)


def _randint(*args: Any, size: Any = None, low: int = 0, high: int = 0, **kwargs: Any) -> Tensor:
    *bounds, size = args if size is None else (*args, size)
    kwargs.setdefault("dtype", torch.int64)
    return torch.full(tuple(size), bounds[0] if len(bounds) == 2 else low, **kwargs)


def _likelier(p: Tensor, **_: Any) -> Tensor:
    return (p >= 0.5).to(p.dtype)


_CONSTANTS: dict[str, Any] = {
    "randn": lambda *size, **kwargs: torch.zeros(*size, **kwargs) + 0.5,
    "rand": lambda *size, **kwargs: torch.zeros(*size, **kwargs) + 0.5,
    "randn_like": lambda x, **kwargs: torch.zeros_like(x, **kwargs) + 0.5,
    "rand_like": lambda x, **kwargs: torch.zeros_like(x, **kwargs) + 0.5,
    "normal": _normal,
    "bernoulli": _likelier,
    "randint": _randint,
    "randperm": lambda n, **kwargs: torch.arange(n, **kwargs),
    "multinomial": lambda p, num_samples, *_, **__: p.topk(num_samples).indices,
}
_IN_PLACE: dict[str, Any] = {
    "normal_": lambda x, mean=0.0, std=1.0: x.fill_(mean + 0.5 * std),
    "uniform_": lambda x, from_=0.0, to=1.0: x.fill_((from_ + to) / 2),
    "exponential_": lambda x, lambd=1.0: x.fill_(1.0 / lambd),
    "bernoulli_": lambda x, p=0.5: x.copy_(_likelier(torch.as_tensor(p, dtype=x.dtype, device=x.device))),
    "random_": lambda x, *_: x.zero_(),
}

_OF_NUMPY: dict[str, Any] = {
    "randn": lambda *size: _full(0.5, size),
    "rand": lambda *size: _full(0.5, size),
    "random": lambda size=None: _full(0.5, size),
    "random_sample": lambda size=None: _full(0.5, size),
    "standard_normal": lambda size=None: _full(0.5, size),
    "normal": lambda loc=0.0, scale=1.0, size=None: _full(loc + 0.5 * scale, size),
    "uniform": lambda low=0.0, high=1.0, size=None: _full((low + high) / 2, size),
    "randint": lambda low, high=None, size=None, dtype=int: _full(0 if high is None else low, size),
}


def _full(value: Any, size: Any) -> Any:
    return value if size in (None, ()) else numpy.full(size, value)


def _device(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), torch.device("cpu"))
