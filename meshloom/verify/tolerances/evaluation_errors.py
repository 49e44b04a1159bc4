"""How far an evaluation of the plan is from one device's, and how far rounding explains it: the mean of each metric, and each chunk's part in
it.

An error passes up to the first of these that suffices; the second costs evaluations more, and is only asked where the first does not:

    32 units in the last place
    what rounding does: how far parameters that are perturbed by some units move it on one device. Of a metric twice the most of several
        perturbations (where operators are divided and cast, four times), for a chunk that of any chunk, as one number may stay where it is by chance

Equal values are cast to equal ones wherever operators run on whole chunks, so there units are those of the parameters' precision, whatever
the metric is computed in; where operators are divided they are those of what modules cast to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.evaluation import EvaluatedChunk, means_of

_LEAST, _ENOUGH = 3, 12  # perturbations; perturbed chunks
# times the most that perturbations move a metric; of units that are no more than operators round by
OF_METRICS, OF_LOWERED = 2, 4

Evaluated = Sequence[EvaluatedChunk]


@dataclass(frozen=True, kw_only=True)
class EvaluationTolerances:
    """Of one evaluation. right: one device's. unmeasured: of numbers, relative to their size. times: what rounding does to a metric.
    moved: one device's evaluation with parameters perturbed for the n-th time."""

    right: Evaluated
    unmeasured: float
    times: int
    moved: Callable[[int], Evaluated]

    @cached_property
    def effects(self) -> Mapping[str, tuple[float, float]]:
        """How far rounding moves a metric, of all data and the most of a chunk."""
        means = means_of(self.right)
        found = dict.fromkeys(means, (0.0, 0.0))
        for number in range(max(_LEAST, -(-_ENOUGH // max(len(self.right), 1)))):
            moved = self.moved(number)
            for name, value in means_of(moved).items():
                of_chunks = [error for _, error in chunk_errors(moved, self.right, name)]
                found[name] = max(found[name][0], metric_error(value, means[name])), max(found[name][1], *of_chunks)  # fmt: skip
        return found

    def error(self, what: str, metric: str, error: float, step: int, *, of_chunk: bool) -> TensorError:
        """`what` is off by this, of the metric of all data or of a chunk's part in it."""
        allowed = self.unmeasured
        if allowed < error < math.inf:
            allowed = max(allowed, self.times * self.effects.get(metric, (0.0, 0.0))[of_chunk])
        return TensorError(name=what, kind="metric", step=step, error=error, tolerance=allowed, moved=allowed > self.unmeasured)  # fmt: skip


def metric_errors(ours: Mapping[str, float], chunks: Evaluated, tolerances: EvaluationTolerances, step: int) -> list[TensorError]:  # fmt: skip
    """Of every metric its mean, and the chunk that is farthest off. ours, chunks: the plan's."""
    found: list[TensorError] = []
    for name, value in means_of(tolerances.right).items():
        error = metric_error(ours.get(name, math.nan), value)
        found.append(tolerances.error(name, name, error, step, of_chunk=False))
        off = max(chunk_errors(chunks, tolerances.right, name), key=lambda each: each[1], default=None)
        if off is not None:
            what = f"{name} of chunk {off[0].chunk} of batch {off[0].batch}"
            found.append(tolerances.error(what, name, off[1], step, of_chunk=True))
    return found


def chunk_errors(ours: Evaluated, right: Evaluated, name: str) -> Iterator[tuple[EvaluatedChunk, float]]:
    """How far a metric of each chunk is off, relative to the larger of one device's and of what chunks have on average; of those that both
    have."""
    here = {(each.batch, each.chunk): each.sums[name] for each in ours}
    # what chunks add to it on average, without signs
    size = sum(abs(each.sums[name][0]) for each in right) / max(len(right), 1)
    for each in right:
        if (mine := here.get((each.batch, each.chunk))) is not None:
            yield each, metric_error(mine[0], each.sums[name][0], size)


def metric_error(ours: float, right: float, size: float = 0.0) -> float:
    """How far a number is off, relative to the larger of one device's and of `size`."""
    if ours == right or (math.isnan(ours) and math.isnan(right)):
        return 0.0
    size = max(abs(right), size)
    return abs(ours - right) / size if size and math.isfinite(ours - right) else math.inf
