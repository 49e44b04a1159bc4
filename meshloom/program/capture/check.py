"""Compares a program with the module it was captured from: loss, gradients and buffers, on fresh batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CODE_ERRORS, CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.modules.own_generators import own_generators, seed_own_generators
from meshloom.core.moments.current_step import Moment
from meshloom.core.moments.leaf_draws import leaves_in
from meshloom.core.random import KeyedDraws, derive, preserved_draws, seed_everything
from meshloom.program.capture.restored import attributes_put_back, cloned, restored
from meshloom.program.capture.sketch import Sketch, sketch
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.lines import WAYS_OUT
from meshloom.program.ir.program import Program
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.program.opaque.bound import bound
from meshloom.program.opaque.operator import trained_writes
from meshloom.program.run.batch_norms import AlignedGradients, has_single_samples
from meshloom.program.run.execute import run_program
from meshloom.program.trace.precision import default_precision, in_precision
from meshloom.program.trace.repeated_export import one_thread

# The same operators run in the same order; only the order in which gradients of one tensor add up may differ.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

_STEPS = (1, 998)  # the numbers of the steps that the batches are of


class Difference(NamedTuple):
    """The largest error of a program against eager, of the loss, a gradient or a buffer.

    what: where it is. telling: whether losses were finite, and each gradient was nonzero in some batch.
    """

    error: float
    what: str
    telling: bool = True


class DiffersError(CaptureError):
    """A program that computes other numbers than eager. path: the first module that does; None: unknown."""


class _Ran(NamedTuple):
    """Results of a run of the loss. gradients: sketches, as full ones take the memory of another model."""

    outputs: list[Any]
    gradients: dict[str, Sketch]
    buffers: dict[str, Tensor]


def check_against_module(
    program: Program,
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[Any],
    *,
    tolerance: float | None = None,
) -> Difference:
    """Run both on each of `batches`; raise `CaptureError` where they differ. The model is unchanged
    afterwards.

    tolerance: largest ||program - eager|| / max(||eager||, 1e-3 of the largest gradient norm). Default: by
    the model's lowest precision. Both use the model's own parameters, and gradients are freed one by one:
    besides activations no memory of the model's size is needed. For gradients larger than `sketch.SMALL`
    norms are estimated from sketches, within a few percent, and equal gradients have a distance of zero.
    """
    written = trained_writes(program)
    program = bound(program, model)
    limit = tolerance if tolerance is not None else _tolerance(program)
    worst = Difference(0.0, "the loss")
    with one_thread(), restored(model, written), preserved_draws(), default_precision(program.precision):
        mirror = _copies(named_buffers(model))
        parameters = _parameters(model, written)
        draws = any(node.num_draws for node in program.nodes)
        moved: dict[str, bool] = {}
        finite = True

        def as_written(eager: Callable[[], _Ran], moment: Moment) -> _Ran:
            with moment.entered(), leaves_in(model, program.opaque) if program.opaque else nullcontext():
                return eager()

        for number, batch in enumerate(batches):
            batch = in_precision(batch, program.precision)
            seed = derive("check", number)
            moment = Moment(seed, _STEPS[number % len(_STEPS)])
            seed_own_generators(own_generators(model), seed)
            eager = partial(_eager, model, loss, batch, seed, keyed=draws, single=has_single_samples(program))
            try:
                with attributes_put_back(model) if program.opaque else nullcontext(), moment.entered():
                    found = _program(program, parameters, mirror, batch, seed)
            except CODE_ERRORS:
                as_written(eager, moment)  # where the job's own code fails, with its line
                raise
            expected = as_written(eager, moment)
            difference = _difference(found, expected)
            worst = max(worst, difference, key=lambda each: each.error)
            finite &= all(bool(torch.isfinite(torch.as_tensor(each)).all()) for each in expected.outputs)
            for name, each in expected.gradients.items():
                moved[name] = moved.get(name, False) or each.norm() > 0
            if not difference.error <= limit:
                path = _first_difference(program, model, loss, batch, parameters, mirror, moment, limit)
                where = (
                    "every module's output is the same, so the difference is in the backward or in the loss function"
                    if path is None
                    else f"the first module whose output differs is {path or 'the model'}"
                )
                raise DiffersError(
                    f"The captured program differs from the model: {difference.what} differs by {difference.error:.1e} (limit {limit:.0e}); {where}. {WAYS_OUT}"
                ).at(path)
    return worst._replace(telling=finite and all(moved.values()))


def _parameters(model: nn.Module, written: Collection[str]) -> dict[str, Tensor]:
    """The model's, for the program. written: by leaves, of which it has copies, as eager writes the model's own."""
    return {
        name: (each.detach().clone() if name in written else each.detach()).requires_grad_(each.requires_grad)
        for name, each in model.named_parameters()
    }


def _eager(model: nn.Module, loss: LossFunction, batch: Any, seed: int, *, keyed: bool, single: bool) -> _Ran:
    """A run in eager. Draws are keyed, and gradients of single samples aligned (`batch_norms.py`), only if there are any:
    under autocast, composite operators cast less when a mode sees the operators inside."""
    seed_everything(seed)
    seed_own_generators(own_generators(model), seed)
    batch = cloned(batch)
    with (
        _taking_gradients({**dict(model.named_parameters()), **_differentiated(batch)}) as gradients,
        KeyedDraws() if keyed else nullcontext(),
    ):
        outputs = tree_leaves(loss(model, batch))
        with AlignedGradients() if single else nullcontext():
            _backward(outputs)  # inside the modes: checkpointed blocks draw again
    return _Ran(_detached(outputs), gradients, _copies(named_buffers(model)))


def _program(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Any,
    seed: int,
) -> _Ran:
    seed_everything(seed)
    batch = cloned(batch)
    with _taking_gradients({**parameters, **_differentiated(batch)}) as gradients:
        outputs = tree_leaves(run_program(program, parameters, buffers, batch))
        _backward(outputs)
    return _Ran(_detached(outputs), gradients, _copies(buffers.items()))


def _differentiated(batch: Any) -> dict[str, Tensor]:
    """What of a batch requires gradients, which no data set's does."""
    tensors = leaves_of(batch).tensors
    return {f"{name} of the batch": each for name, each in tensors.items() if each.requires_grad}


@contextmanager
def _taking_gradients(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Sketch]]:
    """Collects sketches of a backward's gradients, by name, and frees each gradient: one exists at a time."""
    taken: dict[str, Sketch] = {}

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found = sketch(parameter.grad)
        # a parameter shared by checkpointed blocks gets its gradient in several parts
        taken[name] = taken[name] + found if name in taken else found
        parameter.grad = None

    with ExitStack() as around:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                around.callback(parameter.register_post_accumulate_grad_hook(partial(take, name)).remove)
        yield taken


def _backward(outputs: list[Any]) -> None:
    """Backward of what the loss returned that requires grad, all elements of one weighed differently; checkpointed blocks do not support
    `autograd.grad`. A metric has none, although one that takes gradients itself may return what requires grad."""
    found = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    if torch.is_grad_enabled() and found:
        torch.autograd.backward(found, [_weights_like(each) for each in found])


def _weights_like(output: Tensor) -> Tensor:
    """1 for a scalar; the sum of a softmax has no gradient, so that elements of others differ."""
    if output.numel() == 1:
        return torch.ones_like(output)
    weights = torch.arange(output.numel(), dtype=torch.float64, device=output.device).cos()
    return weights.view(output.shape).to(output.dtype)


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in tensors}


def _detached(outputs: list[Any]) -> list[Any]:
    return [each.detach() if isinstance(each, Tensor) else each for each in outputs]


def _difference(found: _Ran, expected: _Ran) -> Difference:
    largest = max((each.norm() for each in expected.gradients.values()), default=0.0)
    differences = _differences(found, expected, 1e-3 * largest)
    return max(differences, key=lambda each: math.inf if math.isnan(each.error) else each.error)


def _differences(found: _Ran, expected: _Ran, floor: float) -> Iterator[Difference]:
    for number, (mine, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        what = "the loss" if number == 0 else f"output {number} of the loss function"
        yield Difference(_error(torch.as_tensor(mine), torch.as_tensor(theirs)), what)
    for name in dict.fromkeys([*expected.gradients, *found.gradients]):
        mine, theirs = found.gradients.get(name), expected.gradients.get(name)
        if mine is None or theirs is None:
            yield Difference(math.inf, f"whether {name} has a gradient")
        else:
            error = _relative(mine.distance(theirs), max(theirs.norm(), floor))
            yield Difference(error, f"the gradient of {name}")
    for name, theirs in expected.buffers.items():
        yield Difference(_error(found.buffers[name], theirs), f"buffer {name}")


def _error(mine: Tensor, theirs: Tensor) -> float:
    """||mine - theirs|| / ||theirs||; infinities and NaNs in equal places are equal."""
    if mine.shape != theirs.shape:
        return math.inf
    if torch.equal(mine, theirs) or not theirs.numel():
        return 0.0
    a, b = (
        each.to(torch.complex128 if each.is_complex() else torch.float64).flatten() for each in (mine, theirs)
    )
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), a - b)
    finite = torch.where(b.isfinite(), b, torch.zeros_like(b))
    return _relative(float(difference.norm()), float(finite.norm()))


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
    moment: Moment,
    limit: float,
) -> str | None:
    """The first module, in order of execution, whose eager output is none of its values in the program; None: all
    are."""
    values: dict[str, list[Tensor]] = {}

    def collect(node: Any, value: Any) -> None:
        values.setdefault(node.path, []).extend(
            each.detach().clone() for each in tree_leaves(value) if isinstance(each, Tensor)
        )

    outputs: list[tuple[str, Tensor]] = []
    seed_everything(moment.seed)
    with moment.entered():
        run_program(program, parameters, _copies(buffers.items()), batch, visit=collect)
    with _watched(model, outputs), moment.entered(), leaves_in(model, program.opaque):
        seed_everything(moment.seed)
        with KeyedDraws():
            loss(model, cloned(batch))
    for path, output in outputs:
        inside = [
            each for name in values if name == path or name.startswith(f"{path}.") for each in values[name]
        ]
        same_shape = [each for each in inside if each.shape == output.shape]
        if same_shape and min(_error(each, output) for each in same_shape) > limit:
            return path
    return None


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
