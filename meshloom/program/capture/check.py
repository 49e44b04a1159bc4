"""A program against the module it was read from: loss, every gradient and every buffer, on fresh batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job, LossFunction
from meshloom.core.random import KeyedDraws, derive, preserved_draws, seed_everything
from meshloom.program.capture.sketch import Sketch, sketch
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program
from meshloom.program.trace.attributes import plain_values, whole_attributes
from meshloom.program.trace.precision import build_model, default_precision, in_precision
from meshloom.program.trace.reading import one_thread

# The same operators run in the same order; where gradients of one tensor meet, their sum may have another
# order.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Difference:
    """How far a program was from eager: the largest error of the loss, a gradient or a buffer, and which it
    was.

    telling: whether there was something to compare in each: finite losses, and gradients none of which was
        nothing in all batches.
    """

    error: float
    what: str
    telling: bool = True


@dataclass(frozen=True)
class _Ran:
    """What a loss came to. gradients: of parameters that have one; sketches, as whole ones would be another
    model."""

    outputs: list[Any]
    gradients: dict[str, Sketch]
    buffers: dict[str, Tensor]


def check_against_eager(
    program: Program, job: Job, batches: Sequence[Any], *, tolerance: float | None = None
) -> Difference:
    """Run the program and the job's own model on each of `batches`; raise `CaptureError` where they differ,
    naming the first module that does.

    The model is in the precision that the program was captured in. tolerance: as in `check_against_module`.
    """
    with one_thread():
        model = build_model(job, program.precision, training=program.training, beside=batches[0])
        return check_against_module(program, model, job.loss, batches, tolerance=tolerance)


def check_against_module(
    program: Program,
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[Any],
    *,
    tolerance: float | None = None,
) -> Difference:
    """Run both on each of `batches`, one after another; raise `CaptureError` where they differ. The model
    stays as it is.

    tolerance: largest ||program - eager|| / max(||eager||, 1e-3 of the largest gradient norm). Default: by the model's lowest precision.
    Both use the model's own parameters, and their gradients are let go one by one: besides activations no
    memory of the model's size is needed. Of gradients larger than `sketch.SMALL` the norms are estimates from
    sketches, within a few percent; where the two are equal they are zero.
    """
    limit = tolerance if tolerance is not None else _tolerance(program)
    worst = Difference(0.0, "the loss")
    with one_thread(), _as_it_was(model), preserved_draws(), default_precision(program.precision):
        mirror = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        parameters = {
            name: parameter.detach().requires_grad_(parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        draws = any(node.num_draws for node in program.nodes)
        moved: dict[str, bool] = {}
        finite = True
        for number, batch in enumerate(batches):
            batch = in_precision(batch, program.precision)
            seed = derive("check", number)
            expected = _eager(model, loss, batch, seed, keyed=draws)
            difference = _difference(_program(program, parameters, mirror, batch, seed), expected)
            worst = max(worst, difference, key=lambda each: each.error)
            finite &= all(bool(torch.isfinite(torch.as_tensor(each)).all()) for each in expected.outputs)
            moved |= {
                name: moved.get(name, False) or each.norm() > 0 for name, each in expected.gradients.items()
            }
            if not difference.error <= limit:
                where = _first_difference(program, model, loss, batch, parameters, mirror, seed, limit)
                raise CaptureError(
                    f"The program read from the model is not the model: {difference.what} differs by {difference.error:.1e} (limit {limit:.0e}); {where}. {WAY_OUT}"
                )
    return replace(worst, telling=finite and all(moved.values()))


def check_forward(program: Program, model: nn.Module, loss: LossFunction, batch: Any) -> None:
    """The same of one forward alone: what the loss returns, and buffers. For a program that was compared
    before."""
    limit = _tolerance(program)
    with one_thread(), _as_it_was(model), preserved_draws(), default_precision(program.precision):
        mirror = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        batch, seed = in_precision(batch, program.precision), derive("check", 0)
        draws = any(node.num_draws for node in program.nodes)
        expected = _eager(model, loss, batch, seed, keyed=draws, backward=False)
        found = _program(program, dict(model.named_parameters()), mirror, batch, seed, backward=False)
    difference = _difference(found, expected)
    if not difference.error <= limit:
        raise CaptureError(
            f"{difference.what} of its forward differs from eager's by {difference.error:.1e} (limit {limit:.0e})."
        )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and plain attributes are afterwards what they were, and no gradients are there
    meanwhile."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(module, dict(vars(module)["_buffers"])) for module in model.modules()]
    values = {id(buffer): (buffer, buffer.detach().clone()) for buffer in model.buffers()}
    plain = plain_values(model)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with whole_attributes(model):
            yield
    finally:
        for (path, name), value in plain.items():
            vars(model.get_submodule(path))[name] = value
        for module, own in buffers:
            vars(module)["_buffers"].update(own)
        with torch.no_grad():
            for buffer, value in values.values():
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _eager(
    model: nn.Module, loss: LossFunction, batch: Any, seed: int, *, keyed: bool, backward: bool = True
) -> _Ran:
    """Plain eager where nothing is drawn: composite operators cast less under autocast when a mode watches
    what they are made of."""
    seed_everything(seed)
    with (
        _taking_gradients(dict(model.named_parameters())) as gradients,
        KeyedDraws() if keyed else nullcontext(),
    ):
        outputs = tree_leaves(loss(model, _cloned(batch)))
        if backward:
            _backward(outputs)  # checkpointed blocks draw again in it
    return _Ran(
        _detached(outputs),
        gradients,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def _program(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Any,
    seed: int,
    *,
    backward: bool = True,
) -> _Ran:
    seed_everything(seed)
    with _taking_gradients(parameters) as gradients:
        outputs = tree_leaves(run_program(program, parameters, buffers, batch))
        if backward:
            _backward(outputs)
    return _Ran(
        _detached(outputs), gradients, {name: buffer.detach().clone() for name, buffer in buffers.items()}
    )


@contextmanager
def _taking_gradients(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Sketch]]:
    """Backward puts sketches of the gradients here, by name, and keeps none: one is whole at a time."""
    taken: dict[str, Sketch] = {}

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found = sketch(parameter.grad)
        # checkpointed blocks that share it bring it one by one
        taken[name] = taken[name] + found if name in taken else found
        parameter.grad = None

    with ExitStack() as around:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                around.callback(parameter.register_post_accumulate_grad_hook(partial(take, name)).remove)
        yield taken


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
    largest = max((each.norm() for each in expected.gradients.values()), default=0.0)
    return max(
        _differences(found, expected, 1e-3 * largest),
        key=lambda each: each.error if each.error == each.error else float("inf"),
    )


def _differences(found: _Ran, expected: _Ran, floor: float) -> Iterator[Difference]:
    for number, (mine, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        yield Difference(
            _error(torch.as_tensor(mine), torch.as_tensor(theirs)),
            "the loss" if number == 0 else f"output {number} of the loss function",
        )
    for name in dict.fromkeys([*expected.gradients, *found.gradients]):
        mine, theirs = found.gradients.get(name), expected.gradients.get(name)
        if mine is None or theirs is None:
            yield Difference(float("inf"), f"whether {name} has a gradient")
        else:
            yield Difference(
                _relative(mine.distance(theirs), max(theirs.norm(), floor)), f"the gradient of {name}"
            )
    for name, theirs in expected.buffers.items():
        yield Difference(_error(found.buffers[name], theirs), f"buffer {name}")


def _error(mine: Tensor, theirs: Tensor) -> float:
    """||mine - theirs|| / ||theirs||; infinities and missing numbers in equal places are equal."""
    if mine.shape != theirs.shape:
        return float("inf")
    if torch.equal(mine, theirs) or not theirs.numel():
        return 0.0
    a, b = (
        each.to(torch.complex128 if each.is_complex() else torch.float64).flatten() for each in (mine, theirs)
    )
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), a - b)
    return _relative(
        float(difference.norm()), float(torch.where(b.isfinite(), b, torch.zeros_like(b)).norm())
    )


def _relative(error: float, size: float) -> float:
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
    """Names the first module, in order of execution, none of whose values in the program is its eager
    output."""
    values: dict[str, list[Tensor]] = {}

    def collect(node: Any, value: Any) -> None:
        values.setdefault(node.path, []).extend(
            each.detach().clone() for each in tree_leaves(value) if isinstance(each, Tensor)
        )

    outputs: list[tuple[str, Tensor]] = []
    seed_everything(seed)
    run_program(
        program, parameters, {name: each.clone() for name, each in buffers.items()}, batch, visit=collect
    )
    with _watched(model, outputs):
        seed_everything(seed)
        with KeyedDraws():
            loss(model, _cloned(batch))
    for path, output in outputs:
        inside = [
            each
            for name, found in values.items()
            if name == path or name.startswith(f"{path}.")
            for each in found
        ]
        alike = [each for each in inside if each.shape == output.shape]
        if alike and min(_error(each, output) for each in alike) > limit:
            return f"the first module whose output differs is {path or 'the model'}"
    return "every module's output is the same, so the difference is in the backward or in the loss function"


@contextmanager
def _watched(model: nn.Module, outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    def hook(name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs.extend(
                (name, each.detach().clone()) for each in tree_leaves(output) if isinstance(each, Tensor)
            )

        return note

    with ExitStack() as around:
        for name, module in model.named_modules():
            around.callback(module.register_forward_hook(hook(name)).remove)
        yield
