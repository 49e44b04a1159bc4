"""Runs a training script for a few steps, as it is, and records what trains what, and with which numbers.

torch tells: `Tensor.backward`, optimizer steps, iteration of data loaders, calls of modules, clipping, loss scales.
Python tells which lines ran, and which functions returned the tensors that a model was then called with.
"""

from __future__ import annotations

import gc
import io
import random
import runpy
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]
from torch.utils.hooks import RemovableHandle

from meshloom.adopt.watching.averaged import Averages, SeenAverage
from meshloom.adopt.watching.draws import Draws, draws_now, set_draws
from meshloom.adopt.watching.passes import Passes, SeenFrame, SeenPass, on_host, values_of
from meshloom.adopt.watching.users_code import UsersCode, caller, clipping
from meshloom.core.errors import JobError

FURTHER_STEPS = 1000  # in which a script may come to its first evaluation, and
FURTHER_SECONDS = 30.0  # of the processor
NOISE = 3e-6  # of the model's largest gradient: what float32's rounding leaves of a gradient that is 0


@dataclass
class MicroBatch:
    """What one `backward()` was of. samples: as the data loader gave them to its `collate`; batch: the value of the
    function `source` instead. draws: states of generators as the batch came. loss: what `backward()` began at, without a scale. read: data
    loaders, each with the samples of the last batch that it gave for it, and generators as that came."""

    samples: list[Any] | None
    batch: Any
    source: str
    draws: Draws
    loss: float
    line: tuple[str, int]
    read: Mapping[Any, tuple[list[Any], Draws]] = field(default_factory=dict[Any, tuple[list[Any], Draws]])


@dataclass
class Watched:
    """What the first steps of a script were.

    frames: at the first `backward()`, outermost first. steps: of each, its micro-batches. numbers: at the first
    `backward()` of each step, whole numbers by name. rates: of each step, the learning rate of every group.
    before, after: parameters and buffers by name. noise: of each parameter, the elements whose gradient was rounding alone
    in some step. lines: that ran, by file. clips: of each call the function, its
    largest norm, the kind of norm, and the line. passes: evaluations over data loaders, up to the first step behind the first.
    average: a moving average of the parameters. zipped: the loaders that `loader` stands for.
    """

    frames: list[SeenFrame] = field(default_factory=list[SeenFrame])
    optimizers: list[Any] = field(default_factory=list[Any])
    loader: Any = None
    model: Any = None
    steps: list[list[MicroBatch]] = field(default_factory=list[list[MicroBatch]])
    numbers: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    rates: list[list[float]] = field(default_factory=list[list[float]])
    before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    after: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    lines: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    clips: list[tuple[str, float, float, int]] = field(default_factory=list[tuple[str, float, float, int]])
    noise: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    passes: list[SeenPass] = field(default_factory=list[SeenPass])
    average: SeenAverage | None = None
    seeded: bool = False
    closure: bool = False
    nexts: int = 1  # batches of the loader for one backward
    own_modules: bool = False  # it imports files beside it
    zipped: Any = None


def watch(script: Path, words: Sequence[str], num_steps: int, told: Callable[[int, int], None]) -> Watched:
    """Run `script` with `words` as its arguments up to `num_steps` optimizer steps. Generators start from seed 0. told: called with the
    number of steps that it has taken, and that of all.

    Raises `JobError` if it ends without a step; its own exceptions pass through.
    """
    watcher = _Watcher(script, num_steps, told)
    known = set(sys.modules)
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", [str(script), *words]))
        stack.enter_context(patch.object(sys, "path", [str(script.parent), *sys.path]))
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(watcher.installed())
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _EnoughError:
            pass
        except SystemExit as leaving:
            if leaving.code not in (None, 0) and not watcher.watched.steps:
                raise JobError(
                    f"{script.name} ended with {leaving.code!r} before its first step. Give its arguments after --."
                ) from leaving
        except Exception:
            if not watcher.enough:  # what fails behind the steps that are compared is the script's own affair
                raise
    for name in set(sys.modules) - known:  # a job imports the script's other files anew
        if watcher.python.is_users(getattr(sys.modules[name], "__file__", None) or ""):
            watcher.watched.own_modules = True
            del sys.modules[name]
    watched = watcher.watched
    watched.passes, watched.average = watcher.passes.ended, watcher.averages.found()
    if watched.model is not None and not watched.after:  # a short script
        watched.after = values_of(watched.model)
    if not watched.frames:
        raise JobError(
            f"{script.name} ran to its end, and no loss.backward() was seen. Give the arguments with which it trains after --; a file with an ml.Job is trained as it is."
        )
    return watched


class _EnoughError(BaseException):
    """Ends a script whose steps have been seen; no `except Exception` of its own catches it."""


@dataclass
class _Pending:
    """What has come since the last `backward()`."""

    nexts: dict[int, tuple[Any, int]] = field(default_factory=dict[int, tuple[Any, int]])
    samples: dict[Any, tuple[list[Any], Draws]] = field(default_factory=dict[Any, tuple[list[Any], Draws]])
    newest: Any = None
    called: tuple[str, Any, Draws] | None = None


class _Watcher:
    def __init__(self, script: Path, num_steps: int, told: Callable[[int, int], None]) -> None:
        self.watched, self._told = Watched(), told
        self.python = UsersCode(script)
        self.watched.lines = self.python.lines
        self._num_steps = num_steps
        self._pending = _Pending()
        self._scaled: dict[int, tuple[Tensor, float]] = {}
        self._collated: list[Any] = []
        self._step: list[MicroBatch] = []
        self.passes = Passes(self.python.users_frames)
        self.averages = Averages()
        self._in_step, self.enough = False, False  # the steps that are compared have been seen
        self._further, self._until, self._earlier = 0, 0.0, list(_loaders())
        self._buffers: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        trace = sys.gettrace()
        hooks: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        clip = torch.nn.utils.clip_grad
        with ExitStack() as stack:
            stack.enter_context(_from_seed_0())
            for place, name, wrap in (
                (Tensor, "backward", self._backward),
                (nn.Module, "__call__", self._call),
                (torch, "compile", lambda _: lambda model=None, **_: model if model is not None else (lambda each: each)),
                (torch, "manual_seed", self._seed),
                (torch, "save", self._save),
                (torch.amp.grad_scaler.GradScaler, "scale", self._scale),
                (DataLoader, "_get_iterator", self._iterator),
                (_BaseDataLoaderIter, "__next__", self._next),
                *((place, name, partial(clipping, self.watched.clips)) for place in (torch.nn.utils, clip) for name in ("clip_grad_norm_", "clip_grad_value_")),
            ):  # fmt: skip
                stack.enter_context(patch.object(place, name, wrap(getattr(place, name))))
            sys.settrace(self.python.trace)
            try:
                yield
            finally:
                sys.settrace(trace)
                for hook in hooks:
                    hook.remove()

    # --- What torch tells

    def _seed(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        def manual_seed(value: int) -> Any:
            self.watched.seeded |= self.python.is_users(caller(1).f_code.co_filename)
            return seed(value)

        return manual_seed

    def _save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: None if self.enough else save(*given, **named)

    def _iterator(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def get_iterator(loader: Any) -> Any:
            workers = loader.num_workers, loader.timeout
            loader.num_workers, loader.timeout = 0, 0
            iterator = get(loader)
            loader.num_workers, loader.timeout = workers
            collate = iterator._dataset_fetcher.collate_fn

            def recorded(samples: Any) -> Any:
                self._collated = list(samples) if isinstance(samples, list) else []
                return collate(samples)

            iterator._dataset_fetcher.collate_fn = recorded
            iterator._adopted = loader
            self.passes.began(loader)
            return iterator

        return get_iterator

    def _next(self, following: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            loader = iterator._adopted
            try:
                batch = following(iterator)
            except StopIteration:
                self.passes.came_to_end(loader, caller(1), len(self.watched.steps) + self._further)
                raise
            self.passes.gave(loader, self._collated)
            pending = self._pending
            pending.newest = loader
            last, count = pending.nexts.get(id(loader), (None, 0))
            pending.nexts[id(loader)] = iterator, count + 1 if last is iterator else 1
            pending.samples[loader] = (self._collated, draws_now())
            return batch

        return __next__

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *given: Any, **named: Any) -> Any:  # noqa: N807
            if (
                self._pending.called is None
                and torch.is_grad_enabled()
                and any(True for _ in module.parameters())
            ):
                inputs = [each for each in [*given, *named.values()] if isinstance(each, Tensor)]
                found = self.python.returned_with(inputs)
                if found is not None:
                    self._pending.called = *found, draws_now()
            if self.watched.loader is not None:
                self.passes.called(module)
            if id(module) not in self._buffers and not self.watched.steps:
                self._buffers[id(module)] = {name: on_host(each) for name, each in module.named_buffers()}
            return call(module, *given, **named)

        return __call__

    def _scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, Tensor):
                self._scaled = {id(result): (result, float(outputs.detach()))}
            return result

        return scaled

    def _backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def watched_backward(loss: Tensor, *given: Any, **named: Any) -> Any:
            if loss.numel() == 1:
                self._see_backward(loss, caller(1))
            return backward(loss, *given, **named)

        return watched_backward

    def _see_backward(self, loss: Tensor, frame: types.FrameType | None) -> None:
        watched, pending = self.watched, self._pending
        self.passes.trained()
        if self.enough:
            return
        frames = self.python.users_frames(frame)
        if not frames:
            return
        if not watched.frames:
            watched.frames = frames
            watched.loader = pending.newest
        if not self._step:
            watched.numbers.append(
                {
                    name: value
                    for each in frames
                    for name, value in {**each.attributes, **each.values}.items()
                    if type(value) is int
                }
            )
        known = self._scaled.get(id(loss))
        value = known[1] if known else float(loss.detach())
        at = (str(frames[-1].path), frames[-1].line)
        if watched.loader is not None:
            watched.nexts = max(watched.nexts, pending.nexts.get(id(watched.loader), (None, 0))[1])
            samples, draws = pending.samples.get(watched.loader, (None, draws_now()))
            self._step.append(MicroBatch(samples, None, "", draws, value, at, pending.samples))
        else:
            name, batch, draws = pending.called or ("", None, draws_now())
            self._step.append(MicroBatch(None, batch, name, draws, value, at))
        watched.closure |= self._in_step
        self._pending = _Pending()

    def _before_step(self, optimizer: Any, given: Any, named: Any) -> None:
        watched = self.watched
        if self.enough:
            return
        self._in_step = True
        if not any(each is optimizer for each in watched.optimizers):
            watched.optimizers.append(optimizer)
        if not watched.steps and watched.frames and watched.model is None:
            watched.model = _model_of(watched.frames, watched.optimizers)
            if watched.model is not None:
                early, now = self._buffers.get(id(watched.model), {}), values_of(watched.model)
                watched.before = {name: early.get(name, each) for name, each in now.items()}
        if watched.model is not None:
            self.averages.record(watched.model, watched.frames)
            _note_noise(watched)
        watched.rates.append([float(group["lr"]) for group in optimizer.param_groups if "lr" in group])

    def _after_step(self, optimizer: Any, given: Any, named: Any) -> None:
        watched = self.watched
        self._in_step = False
        if self.enough:
            self._further += 1
        else:
            watched.steps.append(self._step)
            self._step = []
            self.python.in_first_step = False
            self._told(len(watched.steps), self._num_steps)
            if len(watched.steps) < self._num_steps:
                return
            self.enough, self._until = True, time.process_time() + FURTHER_SECONDS
            sys.settrace(None)
            if watched.model is not None:
                watched.after = values_of(watched.model)
        over = self._further >= FURTHER_STEPS or time.process_time() > self._until
        if over or self.passes.ended or not _evaluates(watched, self._earlier):
            raise _EnoughError


@contextmanager
def _from_seed_0() -> Iterator[None]:
    """Seeds all generators; afterwards they, torch's threads and its default dtype are as they were."""
    kept, threads, dtype = draws_now(), torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        set_draws(kept)


def _note_noise(watched: Watched) -> None:
    """As `Watched.noise`, of the gradients that there are."""
    named = watched.model.named_parameters()
    sizes = {
        name: each.grad.abs() for name, each in named if each.grad is not None and not each.grad.is_sparse
    }
    largest = max((float(each.max()) for each in sizes.values() if each.numel()), default=0.0)
    for name, size in sizes.items():
        small = ((size > 0) & (size <= NOISE * largest)).cpu()
        watched.noise[name] = watched.noise.get(name, torch.zeros_like(small)) | small


def _loaders() -> Iterator[Any]:
    return (each for each in gc.get_objects() if issubclass(type(each), DataLoader))


def _evaluates(watched: Watched, earlier: Sequence[Any]) -> bool:
    """Whether an evaluation over another data loader may come. earlier: loaders that are not the script's."""
    if watched.model is None or watched.loader is None:
        return False
    known = {id(each) for each in [*earlier, watched.loader]}
    if any(id(each) not in known for each in _loaders()):
        return True
    texts = [each.read_text(encoding="utf-8") for each in {frame.path for frame in watched.frames}]
    return sum(text.count("DataLoader(") for text in texts) > 1


def _model_of(frames: Sequence[SeenFrame], optimizers: Sequence[Any]) -> nn.Module | None:
    """The smallest module among the values of names that has all parameters that are trained."""
    trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
    modules = {
        id(value): value
        for frame in frames
        for value in [*frame.values.values(), *frame.attributes.values(), *frame.globals.values()]
        if isinstance(value, nn.Module) and trained <= {id(each) for each in value.parameters()}
    }
    return min(modules.values(), key=lambda each: sum(1 for _ in each.modules()), default=None)
