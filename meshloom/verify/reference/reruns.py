"""The last step of a reference once more, in other ways: as one chunk, from moved parameters, and in ways that
would be wrong. To be called between `Reference.run` and `Reference.update`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshloom.core.random import derive
from meshloom.verify.reference.chunks_of_plan import ReferenceShare
from meshloom.verify.reference.mistakes import ChunkGradients, Evidence, thin
from meshloom.verify.reference.reference import Gradients, Reference
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.reference.wide_blocks import apart, norm_of_all

# By how many units in the last place parameters are moved to see what rounding does. A sum of thousands of
# products is off by several; and an event that rounding brings about once in a run, a relu that flips, is met
# often enough to be measured. In half precisions products are summed in float32, which leaves the last
# rounding.
_UNITS = {torch.float64: 16, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}


@contextmanager
def whole_batch(reference: Reference) -> Iterator[tuple[Gradients, StepRecord]]:
    """The step's batch as one chunk: the averaged gradients by chunks, and the record of it, while the
    reference's gradients are its own."""
    with reference.again() as chunked:
        share = ReferenceShare(key=0, samples=reference.samples, members=[(0, reference.samples)])
        ran = reference.run_share(share)
        reference.divide(ran.weight)
        yield (
            chunked,
            StepRecord(
                step=reference.number,
                loss=ran.loss_sum / ran.weight,
                weight=ran.weight,
                gradient_norm=None,
                gradients={},
                chunks=list(reference.records(share, ran)),
            ),
        )


def moved(reference: Reference) -> dict[str, float]:
    """By name, how far the averaged gradients go when the parameters are moved at random by some units of
    rounding.

    The step once more: ||gradient where each element of a parameter is w (1 + u), |u| <= units * eps  -
    gradient||, eps that of the least precise values in the model. Rounding errors are such moves, as far as
    what comes of them can tell (backward error analysis).
    """
    with reference.again() as own, _moved_parameters(reference):
        weight = 0.0
        for share in reference.shares():
            reference.restore()
            weight += reference.run_share(share).weight
        reference.divide(weight)
        return {
            name: apart(there, here)
            for name, there in reference.gradients.items()
            if there is not None and (here := own[name]) is not None
        }


@contextmanager
def _moved_parameters(reference: Reference) -> Iterator[None]:
    """Trainable parameters are moved inside, and as they were afterwards."""
    low = [dtype for cast in reference.casts if isinstance(dtype := getattr(torch, cast.dtype), torch.dtype)]
    farthest = max(_UNITS.get(dtype, 1) * torch.finfo(dtype).eps for dtype in (reference.precision, *low))
    trained = [parameter for parameter in reference.model.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in trained]
    generator = torch.Generator(reference.device).manual_seed(
        derive(reference.job.seed, "moved", reference.number)
    )
    try:
        with torch.no_grad():
            for parameter in trained:
                flat = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                moves = torch.empty(
                    flat.shape,
                    dtype=torch.float32 if flat.element_size() < 4 else flat.dtype,
                    device=flat.device,
                )
                flat.copy_(moves.uniform_(-farthest, farthest, generator=generator).add_(1).mul_(flat))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(trained, kept, strict=True):
                parameter.copy_(value)


def facts(reference: Reference, norms: Mapping[str, float], previous: Gradients | None = None) -> Evidence:
    """What is known without running anything again. norms: of the step's averaged gradients. previous:
    those of the step before, thinned."""
    return Evidence(
        plan=reference.plan,
        norms=norms,
        previous=previous,
        tied=_tied(reference.model),
        clip=reference.job.clip_grad_norm,
    )


def evidence(reference: Reference, facts: Evidence) -> Evidence:
    """The step again, chunk by chunk and in ways that would be wrong, to find
    out what another run did."""
    chunks: list[ChunkGradients] = []
    chunk_norms: list[float] = []
    replica_norms: dict[int, float] = {}
    sums: dict[str, Tensor] = {}
    with reference.again():
        for share in reference.shares():
            reference.restore()
            reference.model.zero_grad(set_to_none=True)
            ran = reference.run_share(share)
            gradients = reference.gradients
            indices = [index for index, _ in share.members]
            chunks.append(ChunkGradients(chunks=indices, weight=ran.weight, gradients=thin(gradients)))
            if facts.clip is None:
                continue
            chunk_norms.append(norm_of_all(gradients))
            replica = indices[0] // reference.plan.microbatches
            before = sums if replica in replica_norms else {}  # chunks of a replica follow each other
            sums = {
                name: before[name] + each if name in before else each
                for name, each in gradients.items()
                if each is not None
            }
            replica_norms[replica] = norm_of_all(sums)
    has_buffers = next(reference.model.buffers(), None) is not None
    return replace(
        facts,
        chunks=chunks,
        chunk_norms=chunk_norms,
        replica_norms=replica_norms,
        unsynchronised=gradients_of(reference, synchronised=False)
        if reference.plan.sync_batch_norm
        else None,
        chained=gradients_of(reference, chained=True)
        if has_buffers and reference.plan.num_chunks > 1
        else None,
    )


def gradients_of(reference: Reference, *, synchronised: bool = True, chained: bool = False) -> Gradients:
    """The step's averaged gradients, thinned, computed in a way that would be wrong.

    synchronised=False: batch statistics of each replica's own samples, whatever the plan says.
    chained: every chunk of a replica reads the buffers that the one before wrote, instead of those of
        before the step.
    """
    m = reference.plan.microbatches
    with reference.again():
        weight, replica = 0.0, -1
        for share in reference.shares(synchronised):
            if not chained or share.members[0][0] // m != replica:
                replica = share.members[0][0] // m
                reference.restore()
            weight += reference.run_share(share).weight
        reference.divide(weight)
        return thin(reference.gradients)


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Parameters that a module holds under several names: first name -> the others."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            tied.setdefault(known, []).append(name)
    return tied
