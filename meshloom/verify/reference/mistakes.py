"""Usual mistakes of averaging gradients, each as the factors with which it lets the chunks' gradients enter.

With G_c the gradient of chunk c's loss *sum*, w_c its weight and W the sum of weights, one device has B = sum
of f_c G_c with
f_c = 1/W for all c. On dp replicas with m microbatches, for example:

    not divided by the replicas     f_c = dp / W                    a chunk is missing      f_c = 0 for it
    mean of the chunks' means       f_c = 1 / w_c / (dp * m)        one replica's own       f_c = 1 / W for its chunks, 0 for others
    last microbatch only            f_c = 1 / W for the last ones   clipped too early       f_c = (what clipping gives) / W
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshloom.core.plan import Plan

CauseKind = Literal[
    "same draws", "data", "weights", "scale", "mean of means", "microbatches", "missing chunk", "not reduced", "reduced twice", "tied", "clipping", "division",
    "stale", "batch statistics", "buffers", "None or zero", "optimizer", "replicas", "loss", "unknown",
]  # fmt: skip
Gradients = Mapping[str, Tensor | None]
ELEMENTS = 4096  # of each tensor are looked at


@dataclass(frozen=True)
class Cause:
    """What probably went wrong, in one sentence."""

    kind: CauseKind
    sentence: str


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """One forward of one device: the plan's chunks in it, its weight, its gradients (of the loss sum,
    thinned)."""

    chunks: Sequence[int]
    weight: float
    gradients: Gradients


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the failing step says, and when its gradients differ also when one device runs it again, chunk by
    chunk. All gradients are thinned.

    norms: 2-norm of the averaged gradient of each parameter that has one.
    replica_norms, chunk_norms: 2-norm of the whole gradient sum of each replica, and of each of `chunks`, for
    jobs that clip. unsynchronised: averaged gradients with each replica's own batch statistics; None where
    that is what the plan says.
    chained: averaged gradients when a replica's chunks read the buffers that the one before wrote; None
        without buffers.
    previous: averaged gradients of the step before; None in the first.
    tied: parameters with several names: first -> others.
    clip: the job's clip_grad_norm.
    """

    plan: Plan
    norms: Mapping[str, float]
    chunks: Sequence[ChunkGradients] = ()
    replica_norms: Mapping[int, float] = field(default_factory=dict[int, float])
    chunk_norms: Sequence[float] = ()
    unsynchronised: Gradients | None = None
    chained: Gradients | None = None
    previous: Gradients | None = None
    tied: Mapping[str, Sequence[str]]
    clip: float | None = None


@dataclass(frozen=True)
class Mistake:
    """A mistake that explains a gradient: `factors`, one per chunk of the evidence.

    `where` follows "All gradients are" or "The gradients of ... are". some: it can concern a part of the
    parameters only.
    """

    kind: CauseKind
    where: str
    factors: Sequence[float]
    some: bool = False


def thin(gradients: Gradients) -> dict[str, Tensor | None]:
    """At most `ELEMENTS` elements of each, evenly spread, flat, as float64 on the CPU."""
    return {name: None if each is None else thinned(each) for name, each in gradients.items()}


def thinned(tensor: Tensor) -> Tensor:
    """See `thin`; memory of its own."""
    dense = tensor.to_dense()
    flat = torch.view_as_real(dense).reshape(-1) if dense.is_complex() else dense.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))].detach().to("cpu", torch.float64, copy=True)


def mistakes(evidence: Evidence, everything: bool) -> Iterator[Mistake]:
    """Simple ones first. `everything`: whether all gradients are wrong, or a part of the parameters only."""
    cut = _Cut.of(evidence)
    yield from _scales(cut, everything)
    if not evidence.plan.sync_batch_norm:  # else no chunk of one device belongs to one replica
        yield from _weights_of_one_replica(cut)
        yield from _own_shares(cut, everything)
    yield from _single_microbatches(cut)
    yield from _missing(cut)
    yield from _means_of_means(cut)
    if evidence.clip and not evidence.plan.sync_batch_norm:
        yield from _clipped_early(cut, evidence, evidence.clip)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The chunks, as lists of equal length: weight, replica and microbatch of each."""

    dp: int
    m: int
    names: list[str]
    weights: list[float]
    replicas: list[int]
    places: list[int]

    @staticmethod
    def of(evidence: Evidence) -> _Cut:
        m = evidence.plan.microbatches
        return _Cut(
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


def _scales(cut: _Cut, everything: bool) -> Iterator[Mistake]:
    dp, m, total = cut.dp, cut.m, cut.total
    if dp > 1 and not everything:
        yield Mistake(
            "reduced twice",
            f"dp = {dp} times one device's and the others right: their bucket is reduced twice",
            cut.all_times(dp),
            True,
        )
    if dp > 1:
        also = f" (or of microbatches, {m} too)" if m == dp else ""
        where = f"dp = {dp} times one device's: the sum is not divided by the number of replicas{also}, or is reduced twice"
        yield Mistake("scale", where, cut.all_times(dp), True)
        yield Mistake(
            "scale",
            f"1/dp = 1/{dp} of one device's: the mean is divided by the number of replicas once more",
            cut.all_times(1 / dp),
            True,
        )
    if m > 1:
        yield Mistake(
            "scale",
            f"microbatches = {m} times one device's: the sum is not divided by the number of microbatches",
            cut.all_times(m),
            True,
        )
        yield Mistake(
            "scale",
            f"1/microbatches = 1/{m} of one device's: the mean is divided by it once more",
            cut.all_times(1 / m),
            True,
        )
    if dp > 1 and m > 1:
        yield Mistake(
            "scale",
            f"dp * microbatches = {dp * m} times one device's: the sum is not divided by it",
            cut.all_times(dp * m),
            True,
        )
    if total != 1:
        yield Mistake(
            "scale",
            f"{total:g} times one device's, the weight of the whole batch: the sum is never divided",
            cut.all_times(total),
            True,
        )
    last = sum(weight for weight, is_last in zip(cut.weights, _last(cut), strict=True) if is_last)
    if m > 1 and last:
        where = f"{total / last:.6g} times one device's: the sum over all {m} microbatches is divided by the weight {last:g} of the last ones only, not by {total:g}"
        yield Mistake("scale", where, cut.all_times(total / last), True)


def _weights_of_one_replica(cut: _Cut) -> Iterator[Mistake]:
    for replica in dict.fromkeys(cut.replicas):
        if cut.dp > 1 and (weight := cut.weight_of(replica)):
            by = f"divided by the weight of replica {replica} alone ({weight:g}), not of all dp = {cut.dp} replicas ({cut.total:g})"
            yield Mistake(
                "scale",
                f"{cut.total / weight:.6g} times one device's: the sum over all replicas is {by}",
                cut.all_times(cut.total / weight),
                True,
            )


def _own_shares(cut: _Cut, everything: bool) -> Iterator[Mistake]:
    rest = (
        "they are never reduced over the replicas"
        if everything
        else "and the others right: their bucket is never reduced"
    )
    for replica in dict.fromkeys(cut.replicas):
        for divisor in dict.fromkeys([cut.total, cut.weight_of(replica), cut.total / cut.dp]):
            if cut.dp > 1 and divisor:
                where = (
                    f"those of replica {replica}'s own samples: {rest}"
                    if everything
                    else f"those of replica {replica}'s own samples, {rest}"
                )
                yield Mistake(
                    "not reduced", where, [(each == replica) / divisor for each in cut.replicas], True
                )


def _single_microbatches(cut: _Cut) -> Iterator[Mistake]:
    if cut.m == 1:
        return
    choices = [
        ("last", _last(cut)),
        *((f"number {j}", [place == j for place in cut.places]) for j in range(cut.m)),
    ]
    for what, chosen in choices:
        weight = sum(weight for weight, each in zip(cut.weights, chosen, strict=True) if each)
        first = sum(
            weight
            for weight, each, replica in zip(cut.weights, chosen, cut.replicas, strict=True)
            if each and replica == 0
        )
        for divisor in dict.fromkeys([cut.total, weight, first]):
            if divisor:
                where = f"those of each replica's {what} microbatch alone: the gradients of the other microbatches are lost"
                yield Mistake("microbatches", where, [each / divisor for each in chosen], True)


def _missing(cut: _Cut) -> Iterator[Mistake]:
    replicas = dict.fromkeys(cut.replicas)
    for replica in replicas if len(replicas) > 1 else ():
        for divisor in (cut.total, cut.total - cut.weight_of(replica)):
            if divisor:
                yield Mistake(
                    "missing chunk",
                    f"without the share of replica {replica}",
                    [(each != replica) / divisor for each in cut.replicas],
                    True,
                )
    for number, name in enumerate(cut.names if len(cut.names) > 1 else ()):
        for divisor in (cut.total, cut.total - cut.weights[number]):
            if divisor:
                factors = [(each != number) / divisor for each in range(len(cut.names))]
                yield Mistake("missing chunk", f"without the share of chunk {name}", factors, True)


def _means_of_means(cut: _Cut) -> Iterator[Mistake]:
    by_replica = {replica: cut.weight_of(replica) for replica in dict.fromkeys(cut.replicas)}
    filled = {
        replica: sum(
            1 for each, weight in zip(cut.replicas, cut.weights, strict=True) if each == replica and weight
        )
        for replica in by_replica
    }
    unequal = "which differ, count as if they were equal"
    for count in dict.fromkeys([sum(1 for weight in by_replica.values() if weight), cut.dp]):
        where = (
            f"the plain mean of the replicas' means: their weights ({_list(by_replica.values())}), {unequal}"
        )
        yield Mistake(
            "mean of means", where, [_inverse(by_replica[replica] * count) for replica in cut.replicas]
        )
    for count in dict.fromkeys([sum(1 for weight in cut.weights if weight), cut.dp * cut.m]):
        where = f"the plain mean of the chunks' means: their weights ({_list(cut.weights)}), {unequal}"
        yield Mistake("mean of means", where, [_inverse(weight * count) for weight in cut.weights])
    for counts in (filled, dict.fromkeys(filled, cut.m)):
        where = f"plain means over microbatches, averaged over the replicas: the chunks' weights ({_list(cut.weights)}), {unequal}"
        pairs = list(zip(cut.replicas, cut.weights, strict=True))
        yield Mistake(
            "mean of means",
            where,
            [by_replica[r] * _inverse(weight * counts[r] * cut.total) for r, weight in pairs],
        )
        yield Mistake("mean of means", where, [_inverse(weight * counts[r] * cut.dp) for r, weight in pairs])


def _clipped_early(cut: _Cut, evidence: Evidence, clip: float) -> Iterator[Mistake]:
    """Each replica's gradient, or each chunk's, as a mean, a sum, or its part of the whole mean; then a
    weighted mean or a plain one."""

    def kept(norm: float) -> float:
        return min(1.0, clip / norm) if norm else 1.0

    by_replica = {replica: cut.weight_of(replica) for replica in cut.replicas}
    mean = {
        replica: kept(norm * _inverse(by_replica[replica]))
        for replica, norm in evidence.replica_norms.items()
    }
    plain = {replica: kept(norm) for replica, norm in evidence.replica_norms.items()}
    part = {replica: kept(norm * _inverse(cut.total)) for replica, norm in evidence.replica_norms.items()}
    chunk_norms = list(zip(evidence.chunk_norms, cut.weights, strict=True))
    where = f"clipped to {clip:g} on each replica, or for each chunk, before they are averaged; one device clips their mean"
    for factors in (
        [mean[replica] / cut.total for replica in cut.replicas],
        [mean[replica] * _inverse(by_replica[replica] * cut.dp) for replica in cut.replicas],
        [plain[replica] / cut.total for replica in cut.replicas],
        [part[replica] / cut.total for replica in cut.replicas],
        [kept(norm * _inverse(weight)) / cut.total for norm, weight in chunk_norms],
        [kept(norm * _inverse(cut.total)) / cut.total for norm, _ in chunk_norms],
        [kept(norm) / cut.total for norm, _ in chunk_norms],
    ):
        yield Mistake("clipping", where, factors)


def _last(cut: _Cut) -> list[bool]:
    """Which chunks are the last of their replica that have samples."""
    last = dict(zip(cut.replicas, cut.places, strict=True))  # chunks are in order, so the last one stays
    return [last[replica] == place for replica, place in zip(cut.replicas, cut.places, strict=True)]


def _inverse(value: float) -> float:
    return 1 / value if value else 0.0


def _list(values: Iterable[float]) -> str:
    shown = [f"{value:g}" for value in values]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
