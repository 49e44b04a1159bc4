"""A family's program beside eager: read from two batches, run on two others, in each of `WAYS`.

The oracle is a plain eager run that is written here. It shares only the key of random draws (`KeyedDraws`)
with what it checks: the model is built, converted, run and measured by this file's own code, and where a
program is lifted to float64, eager is lifted call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.random import KeyedDraws, model_seed, seed_everything
from meshloom.program.capture.capture import capture
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program
from tests.families.family import Family
from tests.families.limits import OTHER_KERNEL

READ_FROM = ([0, 1, 2], [3, 4, 5])  # samples of the batches that a program is read from
RUN_ON = ([5, 0, 3], [2, 4, 1])  # and of those that it is compared on


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a program is read and run.

    dtype: to which model and batches are converted before it is read.
    lifted: run in float64 what was read in float32.
    autocast: the loss runs under bfloat16 autocast.
    """

    dtype: torch.dtype = torch.float32
    lifted: bool = False
    dropout: bool = False
    autocast: bool = False
    training: bool = True


WAYS = {
    "float32": Way(),
    "float64": Way(dtype=torch.float64),
    "lifted": Way(lifted=True),
    "dropout": Way(dropout=True),
    "bfloat16": Way(autocast=True),
    "bfloat16, dropout": Way(autocast=True, dropout=True),
    "evaluation": Way(training=False),
}


@dataclass(frozen=True)
class Ran:
    """What one run gave: everything that the loss returned, gradients by name (None: no gradient), and the
    buffers behind it."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def job_in(family: Family, way: Way) -> Job:
    """The family's job as it is read."""
    job = family.make_job(way.dropout)
    if not way.autocast:
        return job

    def loss(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return job.loss(model, batch)

    return replace(job, loss=loss)


def batches_of(job: Job, orders: tuple[list[int], ...]) -> list[Any]:
    """Batches of these samples."""
    data = job.data()
    return [default_collate([data[index] for index in order]) for order in orders]


def read(family: Family, way: Way) -> Program:
    """The family's program. Raises what `capture` raises."""
    return _read(family, replace(way, lifted=False))  # lifting is up to those who run it


@lru_cache(maxsize=4)
def _read(family: Family, way: Way) -> Program:
    job = job_in(family, way)
    first, second = batches_of(job, READ_FROM)
    return capture(
        job, (first, second), training=way.training, dtype=way.dtype if way.dtype != torch.float32 else None
    )


def differs_by(program: Program, family: Family, way: Way, *, casts_stay: bool = False) -> float:
    """The largest error of anything that the program gives, on batches that it was not read from: output,
    gradient or buffer.

    An error is ||program - eager|| / max(||eager||, 1e-3 of the largest gradient norm). Where another kernel rounds to bfloat16 it is 1e-1 of it: an
    attention's keys have a bias whose gradient is nothing but rounding.
    casts_stay: compare a lifted program with eager in which casts to float32 stay what they are.
    """
    floor = 1e-1 if way.autocast and family.name in OTHER_KERNEL else 1e-3
    return max(error for _, error in errors_of(program, family, way, casts_stay=casts_stay, floor=floor))


def limit_of(family: Family, way: Way) -> float:
    """The largest error that its program may have.

    The same operators run in the same order; where gradients of one tensor meet, or a kernel is another, sums
    may have another order. Two results that are rounded to bfloat16 in other places differ by no more than
    each of them does from one that is not.
    """
    if way.lifted or way.dtype == torch.float64:
        return 1e-12
    return 2 * rounding_of(family, way) if way.autocast and family.name in OTHER_KERNEL else 2e-6


def rounding_of(family: Family, way: Way) -> float:
    """The largest error of eager under bfloat16 autocast, against eager in float32 with the same draws; as
    `differs_by` measures it."""
    jobs = [job_in(family, each) for each in (way, replace(way, autocast=False))]
    models = [_model(job, way.dtype, way.training) for job in jobs]
    errors: list[float] = []
    for number, batch in enumerate(batches_of(jobs[0], RUN_ON)):
        with KeyedDraws():
            low, high = (
                _run(model, partial(job.loss, model), batch, number)
                for model, job in zip(models, jobs, strict=True)
            )
        errors += [error for _, error in _errors(low, high, 1e-1, any_dtype=True)]
    return max(errors)


def errors_of(
    program: Program, family: Family, way: Way, *, casts_stay: bool = False, floor: float = 1e-3
) -> Iterator[tuple[str, float]]:
    """(what, error) of all that `differs_by` looks at."""
    job = job_in(family, way)
    dtype = torch.float64 if way.lifted else way.dtype
    eager, twin = (_model(job, dtype, way.training) for _ in range(2))
    named = dict(twin.named_parameters()), dict(twin.named_buffers())
    draws = any(node.num_draws for node in program.nodes)
    lifting = lifted_eager if way.lifted and not casts_stay else nullcontext
    for number, batch in enumerate(batches_of(job, RUN_ON)):
        batch = _converted(batch, dtype)
        with _default(dtype):
            # the backward, too: checkpointed blocks draw again in it
            with KeyedDraws() if draws else nullcontext():
                expected = _run(eager, partial(job.loss, eager), batch, number, around=lifting)
            found = _run(
                twin,
                lambda batch: run_program(
                    program, *named, batch, dtype=torch.float64 if way.lifted else None
                ),
                batch,
                number,
            )
        yield from _errors(found, expected, floor, any_dtype=casts_stay)


def _model(job: Job, dtype: torch.dtype, training: bool) -> nn.Module:
    seed_everything(model_seed(job.seed))
    return _convert(job.model(), dtype).train(training)


def _convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As `Module.to`, which leaves complex tensors as they are; written out because some classes have a `to`
    of their own."""
    return nn.Module._apply(model, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _converted(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _run(
    model: nn.Module,
    loss: Callable[[Any], Any],
    batch: Any,
    seed: int,
    *,
    around: Callable[[], Any] = nullcontext,
) -> Ran:
    """Forward and backward under the draws of `seed`; the forward inside of `around()`."""
    model.zero_grad(set_to_none=True)
    copy = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    seed_everything(seed)
    with around():
        outputs = tree_leaves(loss(copy))
    if outputs[0].requires_grad:
        outputs[0].sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return Ran(
        [each.detach() if isinstance(each, Tensor) else each for each in outputs],
        gradients,
        {k: v.clone() for k, v in model.named_buffers()},
    )


class lifted_eager(TorchFunctionMode):  # read as a function: `with lifted_eager():`  # noqa: N801
    """Eager in float64 throughout: no call makes or casts to a lower precision. Numbers of the code are
    rounded to float32 first, as they were when it was read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("dtype") in (None, torch.float32):
            with _default(torch.float32):
                return _in_float64(func(*args, **kwargs))
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args, kwargs = tree_map(lambda each: torch.float64 if each in _LOW else each, (args, kwargs))
        return _in_float64(func(*args, **kwargs))


_LOW = (torch.float32, torch.bfloat16, torch.float16)


def _in_float64(made: Any) -> Any:
    return made.double() if isinstance(made, Tensor) and made.dtype in _LOW else made


def _errors(found: Ran, expected: Ran, floor: float, *, any_dtype: bool) -> Iterator[tuple[str, float]]:
    least = floor * max(
        (float(each.double().norm()) for each in expected.gradients.values() if each is not None), default=0.0
    )
    for number, (mine, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        mine, theirs = torch.as_tensor(mine), torch.as_tensor(theirs)
        yield (
            f"output {number}",
            _error(mine, theirs, 0.0) if any_dtype or mine.dtype == theirs.dtype else float("inf"),
        )
    for name, theirs in expected.gradients.items():
        mine = found.gradients[name]
        if mine is None or theirs is None:
            yield f"gradient of {name}", 0.0 if mine is theirs else float("inf")
        else:
            yield f"gradient of {name}", _error(mine, theirs, least)
    # a module may give a buffer another dtype, a program does not
    for name, theirs in expected.buffers.items():
        yield f"buffer {name}", _error(found.buffers[name], theirs, 0.0)


def _error(mine: Tensor, theirs: Tensor, least: float) -> float:
    """Infinity where shapes differ, or where one is finite and the other is not."""
    if mine.shape != theirs.shape:
        return float("inf")
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    a, b = mine.to(wide), theirs.to(wide)
    if torch.equal(a, b):
        return 0.0
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a[a.isfinite()], b[b.isfinite()]
    size = max(float(b.norm()), least)
    return float((a - b).norm()) / size if size else float((a - b).norm())
