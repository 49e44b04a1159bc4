"""Reruns of the reference's last step: rounded otherwise, chunk by chunk, and with draws that would be wrong.
To be called between `Reference.run` and `Reference.update`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from meshloom.core.plan import Plan
from meshloom.core.random import derive
from meshloom.verify.reference.chunks_of_plan import ReferenceForward
from meshloom.verify.reference.float64_blocks import Subsampled, norm, rerun_distance, subsample_each
from meshloom.verify.reference.reference import Gradients, Reference, changed_buffers

# Size of the perturbation, in units in the last place. A sum of thousands of products is off by several; and
# rare events that rounding causes, such as a ReLU that flips, occur often enough to be measured. In half
# precisions products are summed in float32, so only the last rounding counts.
ROUNDING_UNITS = {torch.float64: 16, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
_LOSS_DRAWS = 3
ENLARGED = 256  # how many times larger a perturbation is in which terms that cancel do so no longer
_OTHER_ORDERS = 3  # how much farther than in the opposite order a sum may be in another


def rounding_effect(reference: Reference) -> tuple[dict[str, float], dict[str, float]]:
    """How far the averaged gradients, and the buffers that the step changes, move when the parameters are perturbed by a
    few units of rounding, by name: ||g(w (1 + u)) - g(w)||.

    Random |u| <= units * eps for each element, where eps is that of the parameters or, in modules that compute in a lower
    precision, of that. To first order, rounding errors are such perturbations (backward error analysis). Where parameters are rounded
    copies, and equal values are rounded to equal ones, chunks are run in the opposite order instead.
    """
    backwards = bool(reference.updated.dtype and not rounds_partial_sums(reference.plan))
    changed = changed_buffers(reference)
    with reference.rerun() as gradients, nullcontext() if backwards else perturbed_parameters(reference):
        reference.evaluate([*reference.forwards()][::-1] if backwards else None, watched=False)
        times = _OTHER_ORDERS if backwards else 1
        of_gradients = {name: times * moved for name, moved in _moved_from(reference, gradients).items()}
        buffers = {name: each for name, each in reference.model.named_buffers() if name in changed}
        return of_gradients, {name: rerun_distance(each, changed[name]) for name, each in buffers.items()}


def outputs_effect(reference: Reference, times: int = 1) -> dict[str, float]:
    """By name, how far the averaged gradients move when the outputs of modules that have parameters are perturbed instead: samples that are
    equal stay so under other parameters, and rounding tells them apart. times: perturbed so many times as much, and that share of how far they
    move: a few terms that cancel, as those of a critic's last bias, may do so in spite of rounding."""
    found = _moved_in(reference, perturbed_outputs(reference, times))
    return {name: moved / times for name, moved in found.items()}


def backward_effect(reference: Reference) -> dict[str, float]:
    """By name, how far the averaged gradients move when what each operator of backward returns is moved within rounding.

    Perturbed parameters or outputs do not show all that rounding may do: where p = 1 is rounded, d - (d p + e q) has the same last places whatever
    d is, and sums of parts of d, which ranks have, have others. Operators that torch can take apart are taken apart, as they sum and subtract within
    (Vignes, "A stochastic arithmetic for reliable scientific computation", 1993).
    """
    return _moved_in(reference, _OtherRounding())


def _moved_in(reference: Reference, otherwise: AbstractContextManager[Any]) -> dict[str, float]:
    with reference.rerun() as gradients, otherwise:
        reference.evaluate(watched=False)
        return _moved_from(reference, gradients)


def _moved_from(reference: Reference, gradients: Gradients) -> dict[str, float]:
    """How far the averaged gradients are from these."""
    return {
        name: rerun_distance(perturbed, gradient)
        for name, perturbed in reference.gradients.items()
        if perturbed is not None and (gradient := gradients[name]) is not None
    }


def rounds_partial_sums(plan: Plan) -> bool:
    """Whether results are sums of parts, each rounded to what operators return, that one device has in one sum: along
    tp, or over replicas whose batch statistics are synchronised. A compiler's fused operators round elsewhere, too."""
    return plan.tp > 1 or plan.compiles or (plan.sync_batch_norm and plan.dp > 1)


def loss_effect(reference: Reference) -> float:
    """How far the last step's mean loss moves when the parameters that it was computed with are perturbed as in `rounding_effect`: the most of
    a few draws, as one number may move by little. To be called after the update; 0 where other values than the parameters were updated."""
    if reference.updated.dtype:
        return 0.0
    means: list[float] = []
    for number in range(_LOSS_DRAWS + 1):
        moved = perturbed_parameters(reference, number) if number else nullcontext()
        with having(reference, reference.before), reference.rerun(), moved:
            loss, weight, _ = reference.evaluate(watched=False)
        means.append(loss / weight if weight else 0.0)
    return max(abs(each - means[0]) if math.isfinite(each) else 0.0 for each in means)


def _is_in_order(plan: Plan) -> bool:
    """Whether operators are of whole chunks, and in one device's order, so that equal values are rounded to equal ones."""
    return not rounds_partial_sums(plan) and plan.pp == 1


def travel_effect(reference: Reference, unit: float) -> dict[str, float]:
    """By name, how far the averaged gradients move when each replica's, and each sum of them, is rounded by `unit` of its size on the way.

    unit * (||g_0|| + ||g_1|| + ...), where g_r is replica r's part of the average: more than of the average itself, where parts cancel. Where
    each chunk's gradients travel (zero=2, 3), of the chunks'.
    """
    plan, weight = reference.plan, sum(chunk.weight for chunk in reference.chunks)
    apart = plan.zero >= 2 or plan.sync_batch_norm
    sizes: dict[str, float] = {}

    def place(forward: ReferenceForward) -> int:
        return forward.key if apart else forward.members[0][0] // plan.microbatches

    with reference.rerun():
        for _, part in itertools.groupby(reference.forwards(), place):
            for _ in reference.again(part):
                pass
            reference.divide(weight)
            for name, each in reference.gradients.items():
                sizes[name] = sizes.get(name, 0.0) + (0.0 if each is None else norm(each))
            reference.model.zero_grad(set_to_none=True)
    return {name: unit * size for name, size in sizes.items()}


@contextmanager
def perturbed_parameters(reference: Reference, number: int = 0, *, whole: bool = False) -> Iterator[None]:
    """A context in which the trainable parameters are perturbed, by other draws for every number. whole: for forwards of whole chunks alone,
    where equal values are cast to equal ones: by units of their own precision."""
    named = {name: each for name, each in reference.parameters.items() if each.requires_grad}
    own, casts = _units_of(reference, whole=whole)
    generator = torch.Generator(reference.device).manual_seed(
        derive(reference.job.seed, "moved", reference.step, *([number] if number else []))
    )
    with having(reference, named):
        with torch.no_grad():
            for name, parameter in named.items():
                here = [dtype for place, dtype in casts if not place or name.startswith(f"{place}.")]
                largest = max(map(_rounding_of, (own, *here)))
                flat = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                dtype = torch.float32 if flat.element_size() < 4 else flat.dtype
                noise = torch.empty(flat.shape, dtype=dtype, device=flat.device)
                flat.copy_(noise.uniform_(-largest, largest, generator=generator).add_(1).mul_(flat))
        yield


@contextmanager
def perturbed_outputs(reference: Reference, times: int = 1) -> Iterator[None]:
    """A context in which floating-point outputs of modules with parameters of their own are perturbed, each element by itself, by so many
    times what rounding does; in half precisions by what it does, as more would be no perturbation. Where operators are one device's, in its
    order, those that the plan rounds to a lower precision stay."""
    lowered = (reference.autocast, reference.updated.dtype) if _is_in_order(reference.plan) else ()

    def perturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        dtype = torch.float32 if output.dtype in lowered else output.dtype
        largest = (times if dtype.itemsize >= 4 else 1) * _rounding_of(dtype)
        return output * noise(output.detach(), largest, next(number)).to(output.dtype)

    number = itertools.count(1)
    with ExitStack() as hooked:
        for module in reference.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooked.callback(module.register_forward_hook(perturb).remove)
        yield


def noise(like: Tensor, largest: float, number: int) -> Tensor:
    """1 + u, |u| <= largest, for each element; by arithmetic, as vmap permits no draws."""
    indices = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float64).view(like.shape)
    uniform = (indices * 12.9898 + number * 78.233).sin().mul(43758.5453).frac()
    return 1 + largest * uniform.to(torch.float64 if like.dtype == torch.float64 else torch.float32)


@contextmanager
def having(reference: Reference, values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the parameters of these names have other values; names of other tensors are passed over."""
    named = {name: reference.parameters[name] for name in values if name in reference.parameters}
    kept = {name: each.detach().clone() for name, each in named.items()}
    try:
        _set(named, values)
        yield
    finally:
        _set(named, kept)


def _set(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, each in parameters.items():
            each.copy_(values[name])


def _rounding_of(dtype: torch.dtype) -> float:
    return ROUNDING_UNITS.get(dtype, 1) * torch.finfo(dtype).eps


def _units_of(reference: Reference, *, whole: bool) -> tuple[torch.dtype, list[tuple[str, torch.dtype]]]:
    """By whose units a parameter is perturbed, relative to each of its elements: by those of its model's precision, and by those of the lower
    ones that its module, or one around it, computes in, with the module. whole: by the first alone."""
    lowered = reference.updated.dtype
    if whole:
        # parameters that are lowered are equal ones, which units of float32 leave as they are
        return torch.float32 if lowered else reference.precision, []
    casts = [(cast.place, getattr(torch, cast.dtype)) for cast in reference.casts]
    casts += [("", lowered)] if lowered else []
    passed = reference.autocast if _is_in_order(reference.plan) else None
    return reference.precision, [(place, dtype) for place, dtype in casts if dtype != passed]


class _OtherRounding(TorchDispatchMode):
    """Multiplies each element of what an operator of backward computes by 1 + u, |u| at most a few units in the last place."""

    def __init__(self) -> None:
        super().__init__()
        self._apart, self._number = dict(core_aten_decompositions().items()), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        in_backward = torch._C._current_autograd_node() is not None  # pyright: ignore[reportPrivateUsage]
        if not in_backward or not _computes(func):
            return func(*args, **kwargs)
        if (apart := self._apart.get(func)) is not None:
            # what is not for every layout or dtype
            with suppress(RuntimeError, TypeError, ValueError, LookupError), self:
                if (found := apart(*args, **kwargs)) is not NotImplemented:
                    return found
        self._number += 1
        return tree_map(partial(_moved, number=self._number), func(*args, **kwargs))


def _computes(func: Any) -> bool:
    """Whether it returns tensors of its own, and draws nothing."""
    aliases = any(each.alias_info is not None for each in func._schema.returns)
    return not (aliases or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags)


def _moved(value: Any, number: int) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        return value
    dtype = value.dtype
    return value * noise(value, _rounding_of(dtype), number).to(dtype)


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """One forward: the plan's chunks in it, its weight, and the subsampled gradients of its loss sum."""

    chunks: Sequence[int]
    weight: float
    gradients: Subsampled


def chunk_by_chunk(reference: Reference) -> list[ChunkGradients]:
    """Each forward by itself, from the start of the step."""
    found: list[ChunkGradients] = []
    with reference.rerun():
        for forward, result in reference.again(reference.forwards()):
            reference.divide(1.0)
            chunks, gradients = [index for index, _ in forward.members], subsample_each(reference.gradients)
            found.append(ChunkGradients(chunks=chunks, weight=result.weight, gradients=gradients))
            reference.model.zero_grad(set_to_none=True)
    return found


def with_equal_draws(reference: Reference) -> dict[str, Subsampled]:
    """The step's averaged gradients, subsampled, if chunks drew alike, by which of them do; none if nothing draws."""
    if not any(chunk.draws for chunk in reference.chunks):
        return {}
    run, m = reference.chunk_run, reference.plan.microbatches
    ways: dict[str, Callable[[int], int]] = {
        "replicas that draw as the first one does": lambda key: key % m,
        "chunks that draw as the first one does": lambda key: 0,
        "chunks that draw as the first one of their replica does": lambda key: key - key % m,
    }
    keys = [forward.key for forward in reference.forwards()]
    found: dict[str, Subsampled] = {}
    for what, way in ways.items():
        if [*map(way, keys)] != keys:
            with run.seeded_as(way), reference.rerun():
                reference.evaluate(watched=False)
                found[what] = subsample_each(reference.gradients)
    return found
