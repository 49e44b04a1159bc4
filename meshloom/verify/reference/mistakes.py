"""Common mistakes in averaging gradients, each as the factors that it applies to the chunks' gradients.

With G_c the gradient of chunk c's loss *sum*, w_c its weight and W the sum of weights, one device computes B
= sum of f_c G_c with f_c = 1/W for all c. On dp replicas with m microbatches, for example:

    not divided by the replicas     f_c = dp / W                    a chunk is missing      f_c = 0 for it
    mean of the chunks' means       f_c = 1 / w_c / (dp * m)        one replica's own       f_c = 1 / W for its chunks, 0 for others
    last microbatch only            f_c = 1 / W for the last ones   clipped too early       f_c = (factor of clipping) / W
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshloom.core.plan import Plan

CauseKind = Literal[
    "same draws", "data", "weights", "scale", "mean of means", "microbatches", "missing chunk", "not reduced", "reduced twice", "tied", "clipping", "division",
    "stale", "batch statistics", "buffers", "None or zero", "optimizer", "replicas", "loss", "resuming", "epoch", "exchanged", "rounding", "border", "stages",
    "forward", "averages", "between steps", "initial values", "turns", "logged", "recompute", "saved", "unknown",
]  # fmt: skip
Gradients = Mapping[str, Tensor | None]
MAX_ELEMENTS = 4096  # of each tensor that are compared


@dataclass(frozen=True)
class Cause:
    """A probable cause of a difference, in one sentence. explains: whether it gives the numbers, in all elements."""

    kind: CauseKind
    sentence: str
    explains: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """One forward of the reference: the plan's chunks in it, its weight, and the subsampled gradients of
    its loss sum."""

    chunks: Sequence[int]
    weight: float
    gradients: Gradients


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """The chunks run in another way. what: the way, behind "those of a forward". kind, why: of the mistake that it would be. chunks: the
    subsampled gradients of their loss sums, in the order of the evidence's chunks; of a use of a tied parameter, what it adds to that parameter's."""

    kind: CauseKind
    what: str
    why: str
    chunks: Sequence[Gradients]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known about a failing step; if its gradients differ, the results of rerunning it chunk by chunk
    as well. All gradients are subsampled.

    norms: 2-norm of each parameter's averaged gradient, where it has one.
    replica_norms, chunk_norms: 2-norm of the whole gradient sum of each replica and of each of `chunks`, for
        jobs that clip.
    unsynchronised: averaged gradients with each replica's own batch statistics; None where the plan says so.
    chained: averaged gradients if a replica's chunks read the buffers that the chunk before wrote; None
        without buffers.
    previous: averaged gradients of the step before; None in the first. weight_before: of its batch; 0 in the first.
    tied: parameters with several names: first -> others.
    clip: the job's clip_grad_norm.
    rows: of sparse gradients that have other rows than one device's, those that they lack and those that they have more.
    parts: what parts of the averaged gradient add to the square of its norm, where that differs, in words.
    others: the chunks in other ways (`verify/causes/other_runs.py`). without_hooks: as they are without those of
        parameters. uses: of each use of a tied parameter alone.
    transposed: the averaged gradients of matrices, transposed. batch_norms: names of modules. frozen: of
        parameters that the job freezes in the step; None: it never freezes any. has_closures: whether an optimizer
        evaluates the loss itself.
    """

    plan: Plan
    norms: Mapping[str, float]
    chunks: Sequence[ChunkGradients] = ()
    replica_norms: Mapping[int, float] = field(default_factory=dict[int, float])
    chunk_norms: Sequence[float] = ()
    unsynchronised: Gradients | None = None
    chained: Gradients | None = None
    previous: Gradients | None = None
    weight_before: float = 0.0
    tied: Mapping[str, Sequence[str]]
    clip: float | None = None
    rows: Mapping[str, tuple[Sequence[int], Sequence[int]]] = field(
        default_factory=dict[str, tuple[Sequence[int], Sequence[int]]]
    )
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    others: Sequence[OtherRun] = ()
    without_hooks: Sequence[OtherRun] = ()
    uses: Sequence[OtherRun] = ()
    transposed: Gradients = field(default_factory=dict[str, Tensor | None])
    batch_norms: frozenset[str] = frozenset()
    frozen: frozenset[str] | None = None
    has_closures: bool = False


@dataclass(frozen=True)
class Mistake:
    """A possible mistake: `factors`, one per chunk of the evidence.

    `description` follows "All gradients are" or "The gradients of ... are". partial: it can affect some of
    the parameters only.
    """

    kind: CauseKind
    description: str
    factors: Sequence[float]
    partial: bool = False


def subsample_each(gradients: Gradients) -> dict[str, Tensor | None]:
    """`subsample` of each gradient."""
    return {name: None if each is None else subsample(each) for name, each in gradients.items()}


def subsample(tensor: Tensor) -> Tensor:
    """At most `MAX_ELEMENTS` evenly spaced elements, flat, copied to the CPU as float64."""
    dense = tensor.to_dense()
    flat = torch.view_as_real(dense).reshape(-1) if dense.is_complex() else dense.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MAX_ELEMENTS))].detach().to("cpu", torch.float64, copy=True)


def mistakes(evidence: Evidence, all_wrong: bool) -> Iterator[Mistake]:
    """Possible mistakes, simple ones first. all_wrong: whether all gradients differ, or some."""
    chunks = _Chunks.of(evidence)
    yield from _scales(chunks, all_wrong, evidence.weight_before)
    if not evidence.plan.sync_batch_norm:  # else a forward has chunks of all replicas
        yield from _weights_of_one_replica(chunks)
        yield from _own_shares(chunks, all_wrong)
    yield from _single_microbatches(chunks)
    yield from _missing(chunks)
    yield from _means_of_means(chunks)
    if evidence.clip and not evidence.plan.sync_batch_norm:
        yield from _clipped_early(chunks, evidence, evidence.clip)


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """The chunks, as parallel lists: name, weight, replica and microbatch of each."""

    dp: int
    m: int
    names: list[str]
    weights: list[float]
    replicas: list[int]
    places: list[int]

    @staticmethod
    def of(evidence: Evidence) -> _Chunks:
        m = evidence.plan.microbatches
        return _Chunks(
            dp=evidence.plan.dp,
            m=m,
            names=["+".join(map(str, each.chunks)) for each in evidence.chunks],
            weights=[each.weight for each in evidence.chunks],
            replicas=[each.chunks[0] // m for each in evidence.chunks],
            places=[each.chunks[0] % m for each in evidence.chunks],
        )

    @property
    def total(self) -> float:
        return sum(self.weights)

    def weight_of(self, replica: int) -> float:
        return sum(
            weight for weight, each in zip(self.weights, self.replicas, strict=True) if each == replica
        )

    def all_times(self, factor: float) -> list[float]:
        return [factor / self.total] * len(self.weights)


def _scales(chunks: _Chunks, all_wrong: bool, before: float) -> Iterator[Mistake]:
    """before: weight of the step before's batch, if there is one."""
    dp, m, total = chunks.dp, chunks.m, chunks.total

    def scale(factor: float, description: str, kind: CauseKind = "scale") -> Mistake:
        return Mistake(kind, description, chunks.all_times(factor), True)

    if dp > 1 and not all_wrong:
        if m == dp:  # which one cannot be told
            why = "and the others right: their bucket is reduced twice, or they are not divided by the number of microbatches"
            yield scale(dp, f"dp = microbatches = {dp} times one device's {why}")
        else:
            why = "and the others right: their bucket is reduced twice"
            yield scale(dp, f"dp = {dp} times one device's {why}", "reduced twice")
    if dp > 1:
        also = f" (or of microbatches, {m} too)" if m == dp else ""
        why = f"the sum is not divided by the number of replicas{also}, or is reduced twice"
        yield scale(dp, f"dp = {dp} times one device's: {why}")
        why = "the mean is divided by the number of replicas once more"
        yield scale(1 / dp, f"1/dp = 1/{dp} of one device's: {why}")
    if m > 1:
        why = "the sum is not divided by the number of microbatches"
        yield scale(m, f"microbatches = {m} times one device's: {why}")
        yield scale(1 / m, f"1/microbatches = 1/{m} of one device's: the mean is divided by it once more")
    if dp > 1 and m > 1:
        why = "the sum is not divided by it"
        yield scale(dp * m, f"dp * microbatches = {dp * m} times one device's: {why}")
    if total != 1:
        why = "the weight of the whole batch: the sum is never divided"
        yield scale(total, f"{total:g} times one device's, {why}")
    last = sum(weight for weight, is_last in zip(chunks.weights, _last(chunks), strict=True) if is_last)
    if m > 1 and last:
        why = f"is divided by the weight {last:g} of the last ones only, not by {total:g}"
        factor = total / last
        yield scale(factor, f"{factor:.6g} times one device's: the sum over all {m} microbatches {why}")
    for factor in (before / total, total / before) if before and total and before != total else ():
        why = f"what it is divided by goes by the weight of the batch before, {before:g}, and not by this one's, {total:g}"
        yield scale(factor, f"{factor:.6g} times one device's: {why}")


def _weights_of_one_replica(chunks: _Chunks) -> Iterator[Mistake]:
    for replica in dict.fromkeys(chunks.replicas) if chunks.dp > 1 else ():
        if weight := chunks.weight_of(replica):
            factor = chunks.total / weight
            by = f"divided by the weight of replica {replica} alone ({weight:g}), not of all dp = {chunks.dp} replicas ({chunks.total:g})"
            description = f"{factor:.6g} times one device's: the sum over all replicas is {by}"
            yield Mistake("scale", description, chunks.all_times(factor), True)


def _own_shares(chunks: _Chunks, all_wrong: bool) -> Iterator[Mistake]:
    rest = (
        ": they are never reduced over the replicas"
        if all_wrong
        else ", and the others right: their bucket is never reduced"
    )
    for replica in dict.fromkeys(chunks.replicas) if chunks.dp > 1 else ():
        factors = [each == replica for each in chunks.replicas]
        for divisor in dict.fromkeys([chunks.total, chunks.weight_of(replica), chunks.total / chunks.dp]):
            if divisor:
                description = f"those of replica {replica}'s own samples{rest}"
                yield Mistake("not reduced", description, [each / divisor for each in factors], True)


def _single_microbatches(chunks: _Chunks) -> Iterator[Mistake]:
    if chunks.m == 1:
        return
    choices = [
        ("last", _last(chunks)),
        *((f"number {j}", [place == j for place in chunks.places]) for j in range(chunks.m)),
    ]
    for what, chosen in choices:
        weight = sum(weight for weight, each in zip(chunks.weights, chosen, strict=True) if each)
        first = sum(
            weight
            for weight, each, replica in zip(chunks.weights, chosen, chunks.replicas, strict=True)
            if each and replica == 0
        )
        for divisor in dict.fromkeys([chunks.total, weight, first]):
            if divisor:
                description = f"those of each replica's {what} microbatch alone: the gradients of the other microbatches are lost"
                yield Mistake("microbatches", description, [each / divisor for each in chosen], True)


def _missing(chunks: _Chunks) -> Iterator[Mistake]:
    replicas = dict.fromkeys(chunks.replicas)
    for replica in replicas if len(replicas) > 1 else ():
        for divisor in (chunks.total, chunks.total - chunks.weight_of(replica)):
            if divisor:
                factors = [(each != replica) / divisor for each in chunks.replicas]
                yield Mistake("missing chunk", f"without the share of replica {replica}", factors, True)
    for number, name in enumerate(chunks.names if len(chunks.names) > 1 else ()):
        for divisor in (chunks.total, chunks.total - chunks.weights[number]):
            if divisor:
                factors = [(each != number) / divisor for each in range(len(chunks.names))]
                yield Mistake("missing chunk", f"without the share of chunk {name}", factors, True)


def _means_of_means(chunks: _Chunks) -> Iterator[Mistake]:
    by_replica = {replica: chunks.weight_of(replica) for replica in dict.fromkeys(chunks.replicas)}
    pairs = list(zip(chunks.replicas, chunks.weights, strict=True))
    filled = dict.fromkeys(by_replica, 0) | Counter(replica for replica, weight in pairs if weight)
    ignored = "which differ, are ignored"
    for count in dict.fromkeys([sum(1 for weight in by_replica.values() if weight), chunks.dp]):
        weights = f"their weights ({_list(by_replica.values())}), {ignored}"
        factors = [_inverse(by_replica[replica] * count) for replica in chunks.replicas]
        yield Mistake("mean of means", f"the plain mean of the replicas' means: {weights}", factors)
    for count in dict.fromkeys([sum(1 for weight in chunks.weights if weight), chunks.dp * chunks.m]):
        weights = f"their weights ({_list(chunks.weights)}), {ignored}"
        factors = [_inverse(weight * count) for weight in chunks.weights]
        yield Mistake("mean of means", f"the plain mean of the chunks' means: {weights}", factors)
    for counts in (filled, dict.fromkeys(filled, chunks.m)):
        description = f"plain means over microbatches, averaged over the replicas: the chunks' weights ({_list(chunks.weights)}), {ignored}"
        factors = [by_replica[r] * _inverse(weight * counts[r] * chunks.total) for r, weight in pairs]
        yield Mistake("mean of means", description, factors)
        factors = [_inverse(weight * counts[r] * chunks.dp) for r, weight in pairs]
        yield Mistake("mean of means", description, factors)


def _clipped_early(chunks: _Chunks, evidence: Evidence, clip: float) -> Iterator[Mistake]:
    """Clipping of each replica's or each chunk's gradient, as a mean, a sum, or its part of the overall
    mean; then a weighted mean or a plain one."""

    def clip_factor(norm: float) -> float:
        return min(1.0, clip / norm) if norm else 1.0

    by_replica = {replica: chunks.weight_of(replica) for replica in chunks.replicas}
    norms = evidence.replica_norms.items()
    mean = {replica: clip_factor(norm * _inverse(by_replica[replica])) for replica, norm in norms}
    plain = {replica: clip_factor(norm) for replica, norm in norms}
    part = {replica: clip_factor(norm * _inverse(chunks.total)) for replica, norm in norms}
    chunk_norms = list(zip(evidence.chunk_norms, chunks.weights, strict=True))
    description = f"clipped to {clip:g} on each replica, or for each chunk, before they are averaged; one device clips their mean"
    for factors in (
        [mean[replica] / chunks.total for replica in chunks.replicas],
        [mean[replica] * _inverse(by_replica[replica] * chunks.dp) for replica in chunks.replicas],
        [plain[replica] / chunks.total for replica in chunks.replicas],
        [part[replica] / chunks.total for replica in chunks.replicas],
        [clip_factor(norm * _inverse(weight)) / chunks.total for norm, weight in chunk_norms],
        [clip_factor(norm * _inverse(chunks.total)) / chunks.total for norm, _ in chunk_norms],
        [clip_factor(norm) / chunks.total for norm, _ in chunk_norms],
    ):
        yield Mistake("clipping", description, factors)


def _last(chunks: _Chunks) -> list[bool]:
    """For each chunk, whether it is the last non-empty one of its replica."""
    # chunks are in order, so the last one remains
    last = dict(zip(chunks.replicas, chunks.places, strict=True))
    return [last[replica] == place for replica, place in zip(chunks.replicas, chunks.places, strict=True)]


def _inverse(value: float) -> float:
    return 1 / value if value else 0.0


def _list(values: Iterable[float]) -> str:
    shown = [f"{value:g}" for value in values]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
