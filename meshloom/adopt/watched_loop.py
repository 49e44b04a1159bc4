"""Watches a script's loop up to the first step of each of its optimizers: which modules, loaders and draws take part in training, and where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, cast

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]

from meshloom.core.modules.packages import is_users
from meshloom.verify.scripts.recorder import EnoughStepsError, replaced

_DRAWS = {
    torch: ("randn", "rand", "randint", "normal", "randn_like", "rand_like", "randint_like"),
    numpy.random: ("normal", "randn", "rand", "uniform", "randint", "random", "standard_normal"),
}
_FEW = 32  # entries of a container that are looked at
Place = tuple[str, int, int]  # an expression by its end: file, line, column in bytes


class UserFrame(NamedTuple):
    """A frame of a user's file, and the expression that runs there. names: its local names, and their values then. frame: with those of later."""

    place: Place
    names: dict[str, Any]
    frame: FrameType

    def names_of(self, value: Any) -> list[str]:
        """Expressions that have this value here; of a comprehension none, beside which no statement can stand."""
        if self.frame.f_code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"):
            return []
        return [*_expressions(value, self.names), *_expressions(value, self.frame.f_globals)]

    def rows(self) -> dict[str, set[int]]:
        """Of each name of a tensor, or of a short container of tensors, their lengths along dim 0."""
        found: dict[str, set[int]] = {}
        for name, each in {**self.frame.f_globals, **self.names}.items():
            small = isinstance(each, dict | list | tuple) and len(cast(list[Any], each)) <= _FEW
            leaves = [one for one in (tree_leaves(each) if small else [each]) if isinstance(one, Tensor)]
            if lengths := {len(one) for one in leaves if one.ndim and not one.requires_grad}:
                found[name] = lengths
        return found


class ModuleCall:
    """The outermost call of a module that has parameters, in grad mode. rows: of its first input. loaders: whose batches came last before
    it. trained: whether a backward went through its results."""

    def __init__(self, module: nn.Module, frames: list[UserFrame], rows: int, loaders: list[Any]) -> None:
        self.module, self.frames, self.rows, self.loaders = module, frames, rows, loaders
        self.trained = False


class Watch:
    """A context, which `EnoughStepsError` ends. calls: of modules, by place. made: optimizers and data loaders, each with the frames that
    made it. stepped: optimizers that made a step. backwards: where gradients are computed, by place. draws: where numbers are drawn for the rows
    of a batch that is trained on."""

    def __init__(self) -> None:
        self.calls: dict[Any, ModuleCall] = {}  # one of each place: frames hold what is of a step
        self.made: dict[Any, list[UserFrame]] = {}
        self.optimizers, self.stepped = list[Optimizer](), set[Optimizer]()
        self.backwards, self.draws = dict[Place, UserFrame](), dict[Place, UserFrame]()
        self._inside = False  # a call, or the fetching of a batch
        self._latest: list[Any] = []  # the loaders whose batches came last
        self._called = False  # whether a module was called since
        self._drawn: list[tuple[UserFrame, int]] = []  # since these batches
        self._undo = ExitStack()

    def __enter__(self) -> Watch:
        for owner in (Optimizer, DataLoader):
            self._watch(owner, "__init__", self._make)
        self._watch(_BaseDataLoaderIter, "__init__", self._start)
        self._watch(_BaseDataLoaderIter, "__next__", self._fetch)
        self._watch(nn.Module, "__call__", self._call)
        self._watch(torch.autograd, "backward", self._differentiate)
        self._watch(torch, "compile", lambda _, *given, **__: given[0] if given else lambda each: each)
        for owner, name in ((owner, name) for owner, names in _DRAWS.items() for name in names):
            self._watch(owner, name, self._draw)
        self._undo.callback(register_optimizer_step_post_hook(self._step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _watch(self, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        def watched(before: Any) -> Any:
            return wraps(before)(lambda *args, **kwargs: watch(before, *args, **kwargs))

        self._undo.enter_context(replaced(owner, name, watched))

    def _make(self, init: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        init(owner, *args, **kwargs)
        self.made[owner] = _user_frames(_caller(owner))
        self.optimizers += [owner] if isinstance(owner, Optimizer) else []

    def _start(self, init: Any, iterator: Any, loader: Any) -> None:
        self._unseen(init, iterator, loader)
        iterator.watched_loader = loader

    def _fetch(self, fetch: Any, iterator: Any) -> Any:
        batch, loader = self._unseen(fetch, iterator), iterator.watched_loader
        if self._called or loader in self._latest:
            self._latest, self._called, self._drawn = [], False, []
        self._latest.append(loader)
        return batch

    def _unseen(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """What is done within is not the script's loop."""
        outer, self._inside = self._inside, True
        try:
            return call(*args, **kwargs)
        finally:
            self._inside = outer

    def _call(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        result = self._unseen(call, module, *args, **kwargs)
        self._called, frames = True, _user_frames(_caller())
        key = id(module), frames[0].place if frames else None
        if torch.is_grad_enabled() and not (key in self.calls and self.calls[key].trained):
            given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
            rows = next((len(each) for each in given if each.ndim), 0)
            noted = self.calls[key] = ModuleCall(module, frames, rows, self._latest)
            leaves = tree_leaves([result, getattr(result, "__dict__", {})])
            for each in (each for each in leaves if isinstance(each, Tensor) and each.requires_grad):
                each.register_hook(lambda _: setattr(noted, "trained", True))
        return result

    def _differentiate(self, backward: Any, *args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        self.backwards |= {each.place: each for each in _user_frames(_caller())[:1]}
        rows = {each.rows for each in self.calls.values() if each.trained}
        self.draws |= {each.place: each for each, length in self._drawn if length in rows}
        self._drawn = []
        if not self.optimizers:
            self.end()

    def _draw(self, draw: Any, *args: Any, **kwargs: Any) -> Any:
        found, frame = draw(*args, **kwargs), _caller()
        seen = self._latest and not self._inside and is_users(frame.f_code.co_filename)
        if seen and getattr(found, "ndim", 0):
            self._drawn.append((_user_frames(frame)[0], len(found)))
        return found

    def _step(self, optimizer: Optimizer, *_: object) -> None:
        self.stepped.add(optimizer)
        if self.stepped >= set(self.optimizers):
            self.end()

    def end(self, *_: object) -> None:
        """As a signal's handler does, too."""
        raise EnoughStepsError


def _caller(owner: Any = None) -> FrameType:
    """The frame that called what is watched, that of no constructor of `owner`."""
    frame: Any = inspect.currentframe()
    while frame.f_code.co_filename == __file__ or (owner is not None and frame.f_locals.get("self") is owner):
        frame = frame.f_back
    return frame


def _user_frames(frame: FrameType | None) -> list[UserFrame]:
    """From `frame` outwards."""
    found: list[UserFrame] = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            _, line, _, column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
            place = frame.f_code.co_filename, line or 0, column or 0
            found.append(UserFrame(place, dict(frame.f_locals), frame))
        frame = frame.f_back
    return found


def _expressions(value: Any, names: dict[str, Any]) -> Iterator[str]:
    yield from (name for name, each in names.items() if each is value)
    for name, each in names.items():
        if isinstance(each, dict):
            entries = islice(cast(dict[Any, Any], each).items(), _FEW)
            yield from (f"{name}[{key!r}]" for key, one in entries if one is value)
        else:
            attributes = getattr(each, "__dict__", {})
            attributes = {**attributes, **attributes.get("_modules", {})}
            yield from (f"{name}.{key}" for key, one in attributes.items() if one is value)
