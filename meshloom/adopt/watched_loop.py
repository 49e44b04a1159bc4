"""Watches a script's loop up to the first step of each of its optimizers: which modules, loaders and draws take part in training, and where."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from importlib.machinery import PathFinder
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
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
_MEANS = ("cross_entropy", "nll_loss")  # over what has no ignored label
# modules of the libraries that have adapters, and their classes
_ADAPTED = {
    "lightning.pytorch.trainer.trainer": "Trainer", "pytorch_lightning.trainer.trainer": "Trainer",
    "transformers.trainer": "Trainer", "accelerate.accelerator": "Accelerator",
}  # fmt: skip
_ALONE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # what one process trains with
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

    def owns(self, name: str) -> bool:
        """Whether it is a name of this frame's, which a statement there may give another value."""
        code = self.frame.f_code
        return code.co_name == "<module>" or name in (*code.co_varnames, *code.co_cellvars)

    def arguments(self) -> list[str]:
        """Names of those of the function."""
        return [*self.frame.f_code.co_varnames[: self.frame.f_code.co_argcount]]

    def rows(self, dim: int) -> dict[str, set[int]]:
        """Of each name of a tensor, or of a short container of tensors, their lengths along `dim`."""
        found: dict[str, set[int]] = {}
        for name, value in {**self.frame.f_globals, **self.names}.items():
            tensors = (each for each in _tensors(value) if each.ndim > dim and not each.requires_grad)
            if lengths := {each.shape[dim] for each in tensors}:
                found[name] = lengths
        return found

    def names_of_tensors(self, tensors: list[Tensor]) -> set[str]:
        """Names of tensors, or of short containers of tensors, which are all among these."""
        own = {id(each) for each in tensors}
        values = {**self.frame.f_globals, **self.names}.items() if own else ()
        found = {name: {*map(id, _tensors(value))} for name, value in values}
        return {name for name, each in found.items() if each and each <= own}


class ModuleCall:
    """The outermost call of a module that has parameters, in grad mode. given: its inputs, by name. loaders: whose batches came last before it.
    method: where it is not the module's own call. means: labels that losses within it take means over, each with the one that is ignored. trained: whether
    a backward went through its results."""

    def __init__(self, module: nn.Module, frames: list[UserFrame], given: dict[str, Any], loaders: list[Any], method: CodeType | None = None) -> None:  # fmt: skip
        self.module, self.frames, self.loaders, self.method = module, frames, loaders, method
        self.inputs = {name: _tensors(each) for name, each in given.items()}
        self.means = list[tuple[Tensor, int]]()
        self.trained = False

    def rows(self, dim: int) -> int:
        """Of its first input that has the dim."""
        inputs = (each for found in self.inputs.values() for each in found)
        return next((each.shape[dim] for each in inputs if each.ndim > dim), 0)

    def states(self) -> list[str]:
        """Inputs that have the rows of the first one along dim 1, such as the states [layers, rows, units] of recurrent layers."""
        rows = self.rows(0)

        def is_state(x: Tensor) -> bool:
            return x.ndim == 3 and x.shape[1] == rows != x.shape[0]

        return [name for name, found in self.inputs.items() if found and all(map(is_state, found))]

    def ignored(self) -> dict[str, int]:
        """Its inputs of labels, each with the one that its loss ignores."""
        where = {(labels.data_ptr(), labels.numel()): label for labels, label in self.means}
        single = ((name, found[0]) for name, found in self.inputs.items() if len(found) == 1)
        places = {name: (each.data_ptr(), each.numel()) for name, each in single}
        return {name: where[place] for name, place in places.items() if place in where}

    def outermost(self, passed: set[CodeType]) -> ModuleCall:
        """The call of a method of another module that it was made in, of none in `passed`; or itself."""
        for at, each in reversed([*enumerate(self.frames)]):
            owner, code = cast(Any, each.names.get("self")), each.frame.f_code
            within = [*owner.modules()][1:] if isinstance(owner, nn.Module) else []
            if code not in passed and any(one is self.module for one in within):
                given = {name: each.names.get(name) for name in each.arguments()[1:]}
                found = ModuleCall(owner, self.frames[at + 1 :], given, self.loaders, code)
                found.means = self.means
                return found
        return self


class Watch:
    """A context, which `EnoughStepsError` ends. calls: of modules, by place. made: optimizers, data loaders and trainers of libraries, each with the
    frames that made it. stepped: optimizers that made a step. backwards: where gradients are computed, by place. draws: where numbers are drawn for
    the rows of a batch that is trained on, each with the frames and how many rows. means: where the loop takes a mean over labels, some of which are
    ignored, by place, each with the ignored label."""

    def __init__(self) -> None:
        self.calls: dict[Any, ModuleCall] = {}  # one of each place: frames hold what is of a step
        self.made: dict[Any, list[UserFrame]] = {}
        self.optimizers, self.stepped = list[Optimizer](), set[Optimizer]()
        self.backwards, self.draws = dict[Place, UserFrame](), dict[Place, tuple[list[UserFrame], int]]()
        self.means = dict[Place, tuple[UserFrame, int]]()
        self._means: list[tuple[Tensor, int]] = []  # within a call
        self._inside = False  # a call, or the fetching of a batch
        self._latest: list[Any] = []  # the loaders whose batches came last
        self._called = False  # whether a module was called since
        self._drawn: list[tuple[list[UserFrame], int]] = []  # since these batches
        self._passed: set[CodeType] = set()  # what has called modules without gradients, or a backward
        self._undo = ExitStack()

    def __enter__(self) -> Watch:
        for owner in (Optimizer, DataLoader):
            self._watch(owner, "__init__", self._make)
        sys.meta_path.insert(0, self)
        self._undo.callback(sys.meta_path.remove, self)
        self._watch(_BaseDataLoaderIter, "__init__", self._start)
        self._watch(_BaseDataLoaderIter, "__next__", self._fetch)
        self._watch(nn.Module, "__call__", self._call)
        self._watch(torch.autograd, "backward", self._differentiate)
        for name in _MEANS:
            self._watch(functional, name, self._take_mean)
        self._watch(torch, "compile", lambda _, *given, **__: given[0] if given else lambda each: each)
        for owner, name in ((owner, name) for owner, names in _DRAWS.items() for name in names):
            self._watch(owner, name, self._draw)
        self._undo.callback(register_optimizer_step_post_hook(self._step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As a finder of modules: those of adapted libraries are watched from the start."""
        found: Any = PathFinder.find_spec(name, path, target) if name in _ADAPTED else None
        if found is not None:
            run, found.loader.exec_module = found.loader.exec_module, lambda module: (
                run(module), self._watch(getattr(module, _ADAPTED[name]), "__init__", self._make)
            )  # fmt: skip
        return found

    def trained(self, *, methods: bool) -> list[ModuleCall]:
        """Calls that are trained, where there are optimizers by these. methods: in place of calls within a method of another module, its own."""
        owned = set[int]().union(*map(parameters_of, self.optimizers))
        found = [each for each in self.calls.values() if each.trained]
        calls = [each.outermost(self._passed) for each in found] if methods else found
        return [each for each in calls if not owned or owned & parameters_of(each.module)]

    def trainers(self) -> dict[Any, str]:
        """Trainers of libraries that have an adapter, each with the library."""
        kinds = ((owner, each.__module__) for owner in self.made for each in type(owner).__mro__)
        return {owner: module.split(".")[0] for owner, module in kinds if module in _ADAPTED}

    def _watch(self, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        def watched(before: Any) -> Any:
            return wraps(before)(lambda *args, **kwargs: watch(before, *args, **kwargs))

        self._undo.enter_context(replaced(owner, name, watched))

    def _make(self, init: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        alone = {name: _ALONE.get(name, each) for name, each in kwargs.items()}
        self._unseen(init, owner, *args, **alone)  # a trainer makes others for itself
        if not self._inside:
            self.made[owner] = _user_frames(owner)
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
        self._means = []
        result = self._unseen(call, module, *args, **kwargs)
        self._called, frames = True, _user_frames()
        key = id(module), *(each.place for each in frames[:1])
        if not torch.is_grad_enabled():
            self._passed |= {each.frame.f_code for each in frames}
        elif not (key in self.calls and self.calls[key].trained):
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            noted = self.calls[key] = ModuleCall(module, frames, given, self._latest)
            noted.means = self._means
            for each in _tensors([result, getattr(result, "__dict__", {})]):
                if each.requires_grad:
                    each.register_hook(lambda _: setattr(noted, "trained", True))
        return result

    def _differentiate(self, backward: Any, *args: Any, **kwargs: Any) -> None:
        frames = _user_frames()
        backward(*args, **kwargs)
        self._passed |= {each.frame.f_code for each in frames}
        self.backwards |= {each.place: each for each in frames[:1]}
        rows = {each.rows(0) for methods in (True, False) for each in self.trained(methods=methods)}
        self.draws |= {each[0].place: (each, length) for each, length in self._drawn if length in rows}
        self._drawn = []
        if not self.optimizers:
            self.end()

    def _take_mean(self, mean: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(mean).bind(*args, **kwargs).arguments
        labels, label = given["target"], given.get("ignore_index", -100)
        is_plain = not any(given.get(each) is not None for each in ("weight", "size_average", "reduce"))
        is_mean = is_plain and given.get("reduction", "mean") == "mean" and torch.is_grad_enabled()
        if is_mean and bool((labels == label).any()):
            frames = _user_frames()
            if self._inside:
                self._means.append((labels, label))
            elif frames:
                self.means[frames[0].place] = frames[0], label
        return mean(*args, **kwargs)

    def _draw(self, draw: Any, *args: Any, **kwargs: Any) -> Any:
        found = draw(*args, **kwargs)
        if self._latest and not self._inside and getattr(found, "ndim", 0):
            self._drawn.append((_user_frames(), len(found)))
        return found

    def _step(self, optimizer: Optimizer, *_: object) -> None:
        self.stepped.add(optimizer)
        if self.stepped >= set(self.optimizers):
            self.end()

    def end(self, *_: object) -> None:
        """As a signal's handler does, too."""
        raise EnoughStepsError


def parameters_of(owner: Optimizer | nn.Module) -> set[int]:
    """Their identities."""
    groups = owner.param_groups if isinstance(owner, Optimizer) else [{"params": owner.parameters()}]
    return {id(each) for group in groups for each in group["params"]}


def _user_frames(owner: Any = None) -> list[UserFrame]:
    """Of what is watched, outwards; of `owner`, which is made, without its constructors."""
    found, frame = list[UserFrame](), inspect.currentframe()
    while frame is not None:
        is_within = not found and owner is not None and frame.f_locals.get("self") is owner
        if is_users(frame.f_code.co_filename) and not is_within:
            _, line, _, column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
            place = frame.f_code.co_filename, line or 0, column or 0
            found.append(UserFrame(place, dict(frame.f_locals), frame))
        frame = frame.f_back
    return found


def _tensors(value: Any) -> list[Tensor]:
    """It, or those of a short container."""
    small = isinstance(value, dict | list | tuple) and len(cast(list[Any], value)) <= _FEW
    return [each for each in (tree_leaves(value) if small else [value]) if isinstance(each, Tensor)]


def _expressions(value: Any, names: dict[str, Any]) -> Iterator[str]:
    yield from (name for name, each in names.items() if each is value)
    for name, each in names.items():
        within: dict[Any, Any] = getattr(each, "__dict__", {})
        within, form = {**within, **within.get("_modules", {})}, ".{}"
        if isinstance(each, dict):
            within, form = dict(islice(cast(dict[Any, Any], each).items(), _FEW)), "[{!r}]"
        yield from (name + form.format(key) for key, one in within.items() if one is value)
