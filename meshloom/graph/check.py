"""A program against the module it was read from: loss, every gradient and every buffer, on fresh batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.errors import CaptureError
from meshloom.graph.leaves import leaves_of
from meshloom.graph.lines import WAY_OUT
from meshloom.graph.precision import build_model, default_precision, in_precision
from meshloom.graph.program import Program
from meshloom.graph.reading import one_thread
from meshloom.job import Job, LossFunction
from meshloom.random import KeyedDraws, derive, preserved_draws, seed_everything

# The same operators run in the same order; where gradients of one tensor meet, their sum may have another order.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Difference:
    """How far a program was from eager: the largest error of the loss, a gradient or a buffer, and which it was."""

    error: float
    what: str


@dataclass(frozen=True)
class _Ran:
    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def check_against_eager(program: Program, job: Job, batches: Sequence[Any], *, tolerance: float | None = None) -> Difference:
    """Run the program and the job's own model on each of `batches`; raise `CaptureError` where they differ, naming the first module that does.

    The model is in the precision that the program was captured in. tolerance: as in `check_against_module`.
    """
    with one_thread():
        model = build_model(job, program.precision, training=program.training)
        return _check(program, model, job.loss, batches, tolerance)


def check_against_module(
    program: Program, model: nn.Module, loss: LossFunction, batches: Sequence[Any], *, tolerance: float | None = None
) -> Difference:
    """Run both on each of `batches`, one after another; raise `CaptureError` where they differ. The model stays as it is.

    tolerance: largest ||program - eager|| / max(||eager||, 1e-3 of the largest gradient norm). Default: by the model's lowest precision.
    """
    with one_thread():
        return _check(program, _copied(model), loss, batches, tolerance)


def _check(program: Program, eager: nn.Module, loss: LossFunction, batches: Sequence[Any], tolerance: float | None) -> Difference:
    """The same with a model that nobody else needs. Alive at most: two sets of parameters, and of gradients."""
    limit = tolerance if tolerance is not None else _tolerance(program)
    worst = Difference(0.0, "the loss")
    mirror = {name: buffer.detach().clone() for name, buffer in eager.named_buffers()}
    parameters = {name: parameter.detach().clone().requires_grad_(parameter.requires_grad) for name, parameter in eager.named_parameters()}
    draws = any(node.num_draws for node in program.nodes)
    with preserved_draws(), default_precision(program.precision):
        for number, batch in enumerate(batches):
            batch = in_precision(batch, program.precision)
            seed = derive("check", number)
            expected = _eager(eager, loss, batch, seed, keyed=draws)
            found = _program(program, parameters, mirror, batch, seed)
            difference = _difference(found, expected)
            del found, expected
            for parameter in (*eager.parameters(), *parameters.values()):
                parameter.grad = None  # before the next batch makes others
            worst = max(worst, difference, key=lambda each: each.error)
            if not difference.error <= limit:
                where = _first_difference(program, eager, loss, batch, parameters, mirror, seed, limit)
                raise CaptureError(
                    f"The program read from the model is not the model: {difference.what} differs by {difference.error:.1e} (limit {limit:.0e}); {where}. {WAY_OUT}"
                )
    return worst


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise CaptureError(f"The model cannot be copied to be compared ({str(error).splitlines()[0]}). {WAY_OUT}") from error


def _eager(model: nn.Module, loss: LossFunction, batch: Any, seed: int, *, keyed: bool) -> _Ran:
    """Plain eager where nothing is drawn: composite operators cast less under autocast when a mode watches what they are made of."""
    model.zero_grad(set_to_none=True)
    named = dict(model.named_parameters())
    seed_everything(seed)
    with KeyedDraws() if keyed else nullcontext():
        outputs = tree_leaves(loss(model, _cloned(batch)))
        _backward(outputs)  # checkpointed blocks draw again in it
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.requires_grad}
    return _Ran(_detached(outputs), gradients, {name: buffer.detach().clone() for name, buffer in model.named_buffers()})


def _program(program: Program, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, seed: int) -> _Ran:
    for parameter in parameters.values():
        parameter.grad = None
    seed_everything(seed)
    outputs = tree_leaves(program.run(parameters, buffers, batch))
    _backward(outputs)
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.requires_grad}
    return _Ran(_detached(outputs), gradients, {name: buffer.detach().clone() for name, buffer in buffers.items()})


def _backward(outputs: list[Any]) -> None:
    """Of the loss, if it has a gradient; checkpointed blocks want backward rather than autograd.grad."""
    if isinstance(outputs[0], Tensor) and outputs[0].requires_grad:
        outputs[0].sum().backward()


def _cloned(batch: Any) -> Any:
    leaves = leaves_of(batch)
    return leaves.rebuild([leaf.detach().clone() for leaf in leaves.tensors.values()])


def _detached(outputs: list[Any]) -> list[Any]:
    return [each.detach() if isinstance(each, Tensor) else each for each in outputs]


def _difference(found: _Ran, expected: _Ran) -> Difference:
    largest = max((float(each.double().norm()) for each in expected.gradients.values() if each is not None), default=0.0)
    return max(_differences(found, expected, 1e-3 * largest), key=lambda each: each.error if each.error == each.error else float("inf"))


def _differences(found: _Ran, expected: _Ran, floor: float) -> Iterator[Difference]:
    for number, (mine, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        yield Difference(
            _error(torch.as_tensor(mine), torch.as_tensor(theirs), 0.0), "the loss" if number == 0 else f"output {number} of the loss function"
        )
    for name, theirs in expected.gradients.items():
        mine = found.gradients[name]
        if mine is None or theirs is None:
            yield Difference(0.0 if mine is theirs else float("inf"), f"whether {name} has a gradient")
        else:
            yield Difference(_error(mine, theirs, floor), f"the gradient of {name}")
    for name, theirs in expected.buffers.items():
        yield Difference(_error(found.buffers[name], theirs, 0.0), f"buffer {name}")


def _error(mine: Tensor, theirs: Tensor, floor: float) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    if torch.equal(mine, theirs) or not theirs.numel():
        return 0.0
    a, b = (each.to(torch.complex128 if each.is_complex() else torch.float64).flatten() for each in (mine, theirs))
    same = (a == b) | (a.isnan() & b.isnan())  # infinities and missing numbers in equal places
    difference = torch.where(same, torch.zeros_like(a), a - b)
    size = max(float(torch.where(b.isfinite(), b, torch.zeros_like(b)).norm()), floor)
    error = float(difference.norm())
    return error / size if size else error


def _tolerance(program: Program) -> float:
    found = [each.meta.dtype for each in program.parameters.values()]
    found += [output.dtype for node in program.nodes for output in node.outputs if output.requires_grad]
    return max((TOLERANCE[dtype] for dtype in found if dtype in TOLERANCE), default=2e-6)


def _first_difference(
    program: Program,
    model: nn.Module,
    loss: LossFunction,
    batch: Any,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    seed: int,
    limit: float,
) -> str:
    """Names the first module, in order of execution, none of whose values in the program is its eager output."""
    model.load_state_dict({**model.state_dict(), **{name: each.detach() for name, each in parameters.items()}}, strict=False)
    values: dict[str, list[Tensor]] = {}

    def collect(node: Any, value: Any) -> None:
        values.setdefault(node.path, []).extend(each.detach().clone() for each in tree_leaves(value) if isinstance(each, Tensor))

    outputs: list[tuple[str, Tensor]] = []
    seed_everything(seed)
    program.run(parameters, {name: each.clone() for name, each in buffers.items()}, batch, visit=collect)
    with _watched(model, outputs):
        seed_everything(seed)
        with KeyedDraws():
            loss(model, _cloned(batch))
    for path, output in outputs:
        inside = [each for name, found in values.items() if name == path or name.startswith(f"{path}.") for each in found]
        alike = [each for each in inside if each.shape == output.shape]
        if alike and min(_error(each, output, 0.0) for each in alike) > limit:
            return f"the first module whose output differs is {path or 'the model'}"
    return "every module's output is the same, so the difference is in the backward or in the loss function"


@contextmanager
def _watched(model: nn.Module, outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    def hook(name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs.extend((name, each.detach().clone()) for each in tree_leaves(output) if isinstance(each, Tensor))

        return note

    with ExitStack() as around:
        for name, module in model.named_modules():
            around.callback(module.register_forward_hook(hook(name)).remove)
        yield
