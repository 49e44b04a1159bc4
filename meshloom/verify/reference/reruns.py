"""Reruns of the reference's last step: with perturbed parameters, and in ways that would be
wrong. To be called between `Reference.run` and `Reference.update`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.core.plan import Plan
from meshloom.core.random import derive
from meshloom.verify.reference.chunk_run import ChunkResult
from meshloom.verify.reference.chunks_of_plan import ReferenceForward
from meshloom.verify.reference.float64_blocks import norm, norm_of_all, rerun_distance
from meshloom.verify.reference.mistakes import (
    ChunkGradients,
    Evidence,
    OtherRun,
    subsample,
    subsample_each,
)
from meshloom.verify.reference.reference import Gradients, Reference, changed_buffers, is_frozen
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.reference.trained_losses import needs_closure

# Size of the perturbation, in units in the last place. A sum of thousands of products is off by several; and
# rare events that rounding causes, such as a ReLU that flips, occur often enough to be measured. In half
# precisions products are summed in float32, so only the last rounding counts.
ROUNDING_UNITS = {torch.float64: 16, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
_MOST_USES = 8  # of tied parameters, that are tried one by one
_LOSS_DRAWS = 3
ENLARGED = 256  # how many times larger a perturbation is in which terms that cancel do so no longer
_OTHER_ORDERS = 3  # how much farther than in the opposite order a sum may be in another


@dataclass(frozen=True, kw_only=True)
class RoundingEffect:
    """How far rounding moves averaged gradients and buffers, by name: ||g(w (1 + u)) - g(w)||."""

    gradients: Mapping[str, float]
    buffers: Mapping[str, float]


def rounding_effect(reference: Reference) -> RoundingEffect:
    """How far the averaged gradients, and the buffers that the step changes, move when the parameters are perturbed by a
    few units of rounding.

    Random |u| <= units * eps for each element, where eps is that of the parameters or, in modules that compute in a lower
    precision, of that. To first order, rounding errors are such perturbations (backward error analysis).
    """
    times = 1
    moved: AbstractContextManager[None] = perturbed_parameters(reference)
    backwards = bool(reference.updated.dtype and _is_whole(reference.plan))
    if backwards:
        times, moved = _OTHER_ORDERS, nullcontext()
    changed = changed_buffers(reference)
    with reference.rerun() as gradients, moved:
        if backwards:
            _run_backwards(reference)
        else:
            reference.evaluate()
        buffers = dict(reference.model.named_buffers())
        return RoundingEffect(
            gradients={name: times * moved for name, moved in moved_from(reference, gradients).items()},
            buffers={
                name: rerun_distance(buffers[name], each)
                for name, each in changed.items()
                if buffers[name].shape == each.shape
            },
        )


def outputs_effect(reference: Reference, times: int = 1) -> dict[str, float]:
    """By name, how far the averaged gradients move when the outputs of modules that have parameters are perturbed instead: samples that are
    equal stay so under other parameters, and rounding tells them apart. times: perturbed so many times as much, and that share of how far they
    move: a few terms that cancel, as those of a critic's last bias, may do so in spite of rounding."""
    with reference.rerun() as gradients, perturbed_outputs(reference, times):
        reference.evaluate(watched=False)
        return {name: moved / times for name, moved in moved_from(reference, gradients).items()}


def moved_from(reference: Reference, gradients: Gradients) -> dict[str, float]:
    """How far the averaged gradients are from these."""
    return {
        name: rerun_distance(perturbed, gradient)
        for name, perturbed in reference.gradients.items()
        if perturbed is not None and (gradient := gradients[name]) is not None
    }


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


def _run_backwards(reference: Reference) -> None:
    """The last step's chunks in the opposite order; buffers are as at its start."""
    weight = 0.0
    for forward in [*reference.forwards()][::-1]:
        reference.restore()
        weight += reference.run_forward(forward).weight
    reference.divide(weight)


def _is_whole(plan: Plan) -> bool:
    """Whether operators are of whole chunks."""
    return plan.tp == 1 and not plan.sync_batch_norm and not plan.compiles


def _is_in_order(plan: Plan) -> bool:
    """Whether operators are of whole chunks, and in one device's order, so that equal values are rounded to equal ones."""
    return _is_whole(plan) and plan.pp == 1


def travel_effect(reference: Reference, unit: float) -> dict[str, float]:
    """By name, how far the averaged gradients move when each replica's, and each sum of them, is rounded by `unit` of its size on the way.

    unit * (||g_0|| + ||g_1|| + ...), where g_r is replica r's part of the average: more than of the average itself, where parts cancel. Where
    each chunk's gradients travel (zero=2, 3), of the chunks'.
    """
    plan, weight = reference.plan, sum(chunk.weight for chunk in reference.chunks)
    sizes: dict[str, float] = {}

    def add() -> None:
        reference.divide(weight)
        for name, each in reference.gradients.items():
            sizes[name] = sizes.get(name, 0.0) + (0.0 if each is None else norm(each))
        reference.model.zero_grad(set_to_none=True)

    with reference.rerun():
        replica = 0
        for forward in reference.forwards():
            now = forward.members[0][0] // plan.microbatches
            if now != replica or plan.zero >= 2 or plan.sync_batch_norm:
                add()
            replica = now
            reference.restore()
            reference.run_forward(forward)
        add()
    return {name: unit * size for name, size in sizes.items()}


@contextmanager
def perturbed_parameters(reference: Reference, number: int = 0, *, whole: bool = False) -> Iterator[None]:
    """A context in which the trainable parameters are perturbed, by other draws for every number. whole: for forwards of whole chunks alone,
    where equal values are cast to equal ones: by units of their own precision."""
    named = [(name, each) for name, each in reference.parameters.items() if each.requires_grad]
    largest_of = _units_of(reference, whole=whole)
    generator = torch.Generator(reference.device).manual_seed(
        derive(reference.job.seed, "moved", reference.step, *([number] if number else []))
    )
    with _values_restored([each for _, each in named]):
        with torch.no_grad():
            for name, parameter in named:
                largest = largest_of(name)
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
        largest = (
            (times if dtype.itemsize >= 4 else 1) * ROUNDING_UNITS.get(dtype, 1) * torch.finfo(dtype).eps
        )
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
    with _values_restored(list(named.values())):
        with torch.no_grad():
            for name, each in named.items():
                each.copy_(values[name])
        yield


@contextmanager
def _values_restored(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context at whose end parameters have the values of its beginning."""
    kept = [each.detach().clone() for each in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _units_of(reference: Reference, *, whole: bool) -> Callable[[str], float]:
    """How far a parameter of this name is perturbed, relative to each of its elements: by units of its model's precision, and
    by those of the lower precisions that its module, or one around it, computes in. whole: by the first alone."""
    casts = [] if whole else [(cast.place, getattr(torch, cast.dtype)) for cast in reference.casts]
    if reference.updated.dtype and not whole:
        casts.append(("", reference.updated.dtype))
    if _is_in_order(reference.plan):
        casts = [(place, dtype) for place, dtype in casts if dtype != reference.autocast]

    # parameters that are lowered are equal ones, which units of float32 leave as they are
    own = torch.float32 if whole and reference.updated.dtype else reference.precision

    def largest(name: str) -> float:
        here = [dtype for place, dtype in casts if not place or name.startswith(f"{place}.")]
        return max(ROUNDING_UNITS.get(each, 1) * torch.finfo(each).eps for each in (own, *here))

    return largest


def initial_evidence(
    reference: Reference, norms: Mapping[str, float], previous: StepRecord | None = None
) -> Evidence:
    """What is known without a rerun. norms: of the step's averaged gradients. previous: one device's step before."""
    tied, clip = _tied(reference.model), reference.turn.clip_grad_norm
    frozen = (
        frozenset(name for name in reference.parameters if is_frozen(reference, name))
        if reference.job.frozen
        else None
    )
    closures = any(map(needs_closure, reference.turn.optimizers))
    return Evidence(
        plan=reference.plan, norms=norms, previous=previous and dict(previous.gradients), tied=tied, clip=clip, frozen=frozen, has_closures=closures,
        weight_before=previous.weight if previous else 0.0,
    )  # fmt: skip


def full_evidence(reference: Reference, initial: Evidence) -> Evidence:
    """The evidence with reruns of the step, chunk by chunk and in ways that would be wrong."""
    chunks: list[ChunkGradients] = []
    chunk_norms: list[float] = []
    replica_norms: dict[int, float] = {}
    sums: dict[str, Tensor] = {}
    with reference.rerun():
        for forward, result in one_by_one(reference):
            gradients = reference.gradients
            indices = [index for index, _ in forward.members]
            chunks.append(
                ChunkGradients(chunks=indices, weight=result.weight, gradients=subsample_each(gradients))
            )
            if initial.clip is None:
                continue
            chunk_norms.append(norm_of_all(gradients))
            replica = indices[0] // reference.plan.microbatches
            before = sums if replica in replica_norms else {}  # the chunks of a replica are consecutive
            sums = {
                name: before[name] + each if name in before else each
                for name, each in gradients.items()
                if each is not None
            }
            replica_norms[replica] = norm_of_all(sums)
    has_buffers = next(reference.model.buffers(), None) is not None
    plan = reference.plan
    unsynchronised = gradients_of(reference, synchronised=False) if plan.sync_batch_norm else None
    chained = gradients_of(reference, chained=True) if has_buffers and plan.num_chunks > 1 else None
    return replace(
        initial, chunks=chunks, chunk_norms=chunk_norms, replica_norms=replica_norms, unsynchronised=unsynchronised, chained=chained,
        uses=[*_tied_uses(reference, initial.tied, chunks)],
        transposed={
            name: subsample(each.t())
            for name, each in reference.gradients.items()
            if each is not None and each.ndim == 2 and not each.is_sparse
        },
        batch_norms=frozenset(name for name, each in reference.model.named_modules() if isinstance(each, _BatchNorm)),
    )  # fmt: skip


def chunk_by_chunk(
    reference: Reference, forwards: Iterator[ReferenceForward] | None = None
) -> list[Gradients]:
    """The subsampled gradients of each forward's loss sum. forwards: None: the step's."""
    with reference.rerun():
        return [subsample_each(reference.gradients) for _ in one_by_one(reference, forwards)]


def one_by_one(
    reference: Reference, forwards: Iterator[ReferenceForward] | None = None
) -> Iterator[tuple[ReferenceForward, ChunkResult]]:
    """Each forward by itself, from the start of the step, after which the gradients are those of its loss sum. forwards: None: the step's."""
    for forward in reference.forwards() if forwards is None else forwards:
        reference.restore()
        reference.model.zero_grad(set_to_none=True)
        result = reference.run_forward(forward, watched=False)
        reference.divide(1.0)
        yield forward, result


def _tied_uses(
    reference: Reference, tied: Mapping[str, Sequence[str]], chunks: Sequence[ChunkGradients]
) -> Iterator[OtherRun]:
    """What a tied parameter's use under each of its names adds to its gradient: all but that of a run in which another parameter takes its place there."""
    uses = [(name, use) for name, others in tied.items() for use in (name, *others)]
    for name, use in uses[:_MOST_USES]:
        path, _, leaf = use.rpartition(".")
        module: Any = reference.model.get_submodule(path)
        kept = module._parameters[leaf]
        module._parameters[leaf] = nn.Parameter(kept.detach())
        try:
            others = chunk_by_chunk(reference)
        finally:
            module._parameters[leaf] = kept
        added: list[Gradients] = []
        for chunk, rest in zip(chunks, others, strict=True):
            whole, without = chunk.gradients.get(name), rest.get(name)
            added.append({name: whole if whole is None or without is None else whole - without})
        yield OtherRun(
            kind="tied", what=f"{name} in its use as {use}", why="it is lost, or added again", chunks=added
        )


def gradients_of(reference: Reference, *, synchronised: bool = True, chained: bool = False) -> Gradients:
    """The step's averaged gradients, subsampled, computed in a way that would be wrong.

    synchronised=False: batch statistics of each replica's own samples, whatever the plan says.
    chained: every chunk of a replica reads the buffers that the chunk before wrote, instead of those at the
        start of the step.
    """
    m = reference.plan.microbatches
    with reference.rerun():
        weight, replica = 0.0, -1
        for forward in reference.forwards(synchronised):
            if not chained or forward.members[0][0] // m != replica:
                replica = forward.members[0][0] // m
                reference.restore()
            weight += reference.run_forward(forward).weight
        reference.divide(weight)
        return subsample_each(reference.gradients)


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Trained parameters that occur under several names: first name -> the others."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name and parameter.requires_grad:
            tied.setdefault(known, []).append(name)
    return tied
