"""The likely cause of metrics that differ: one device's, evaluated or averaged in ways that would be wrong, of which one gives the plan's
numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, evaluated_chunks, means_of
from meshloom.verify.reference.mistakes import Cause, CauseKind
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import having

_MOST = 16  # replicas, chunks, batches, that are tried one by one


def cause_of_metrics(
    ours: Mapping[str, float], allowed: Mapping[str, float], reference: Reference, updates: int, batches: int | None,
    seen: Callable[[], AbstractContextManager[None]], *, averaged: bool,
) -> Cause | None:  # fmt: skip
    """allowed: the tolerance of each metric. seen: a context in which one device has the parameters that evaluations see. averaged: whether
    those are averages. None: no way that is tried gives all of the plan's metrics."""
    with seen():
        chunks = evaluated_chunks(reference, updates, batches)
    ways = _ways_to_average(chunks, reference)
    for kind, what, metrics in (*ways, *_ways_to_evaluate(reference, updates, batches, seen, averaged)):
        if all(
            metric_error(ours.get(name, math.nan), value) <= allowed[name] for name, value in metrics.items()
        ):
            return Cause(kind, f"All metrics are {what}.")
    return None


def metric_error(ours: float, right: float) -> float:
    """How far a metric is off, relative to one device's."""
    if math.isnan(ours) and math.isnan(right):
        return 0.0
    if ours == right:
        return 0.0
    return abs(ours - right) / abs(right) if right and math.isfinite(ours - right) else math.inf


def _ways_to_average(
    chunks: Sequence[EvaluatedChunk], reference: Reference
) -> Iterator[tuple[CauseKind, str, dict[str, float]]]:
    """Of one device's chunks."""
    dp, m, right = reference.plan.dp, reference.plan.microbatches, means_of(chunks)
    for times in dict.fromkeys((dp, m, dp * m)):
        if times > 1:
            much = {name: times * value for name, value in right.items()}
            little = {name: value / times for name, value in right.items()}
            yield "scale", f"{times} times one device's: sums over replicas or chunks are not divided", much
            yield "scale", f"1/{times} of one device's: means are divided once more", little
    for what, key in (
        ("replicas", lambda each: each.chunk // m), ("batches", lambda each: each.batch), ("chunks", lambda each: (each.batch, each.chunk)),
    ):  # fmt: skip
        groups: dict[object, list[EvaluatedChunk]] = {}
        for each in chunks:
            groups.setdefault(key(each), []).append(each)
        if not 1 < len(groups) <= _MOST:
            continue
        of_groups = [means_of(group) for group in groups.values()]
        plain = {name: sum(each[name] for each in of_groups) / len(of_groups) for name in right}
        yield "mean of means", f"the plain mean of the {what}' means: their weights are ignored", plain
        for number, (mine, group) in enumerate(zip(of_groups, groups.values(), strict=True)):
            rest = [each for each in chunks if each not in group]
            yield "not reduced", f"those of number {number} of the {what} alone", mine
            yield "missing chunk", f"without those of number {number} of the {what}", means_of(rest)


def _ways_to_evaluate(
    reference: Reference, updates: int, batches: int | None, seen: Callable[[], AbstractContextManager[None]], averaged: bool
) -> Iterator[tuple[CauseKind, str, dict[str, float]]]:  # fmt: skip
    def metrics() -> dict[str, float]:
        return means_of(evaluated_chunks(reference, updates, batches))

    if averaged:
        yield "averages", "those of the parameters, and not of their averages", metrics()
    for when, values in (("before the last update", reference.before), *reference.earlier.items()):
        if values:
            with having(reference, values):
                yield "stale", f"those of the weights {when}: what was updated is not used", metrics()
    with seen():
        trained = evaluated_chunks(reference, updates, batches, training=True)
    yield "forward", "those of modules in training mode", means_of(trained)
