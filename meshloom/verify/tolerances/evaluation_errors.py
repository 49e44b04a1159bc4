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
from dataclasses import dataclass, field

import torch

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, means_of
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import perturbed_parameters
from meshloom.verify.tolerances.of_precision import rounds_partial_sums

_LEAST, _ENOUGH = 3, 12  # perturbations; perturbed chunks
# times the most that perturbations move a metric; of units that are no more than operators round by
_OF_METRICS, _OF_LOWERED = 2, 4

Evaluated = Sequence[EvaluatedChunk]


@dataclass(frozen=True, kw_only=True)
class EvaluationEffects:
    """How far rounding moves an evaluation of one device, by metric, of all data and the most of a chunk."""

    means: Mapping[str, float]
    chunks: Mapping[str, float]


@dataclass(kw_only=True)
class EvaluationTolerances:
    """The tolerances of one evaluation. right: one device's. unmeasured: of numbers, relative to their size. again: evaluates
    on one device once more, from which `effects` follow."""

    reference: Reference
    right: Evaluated
    unmeasured: float
    lower: torch.dtype | None
    again: Callable[[], Evaluated]
    _effects: EvaluationEffects | None = field(default=None, init=False)

    def of_mean(self, name: str, error: float) -> float:
        """Of a metric whose mean is off by `error`."""
        return self._allowed(error, lambda effects: self._times * effects.means.get(name, 0.0))

    def of_chunk(self, name: str, error: float) -> float:
        """Of a chunk's part in it."""
        return self._allowed(error, lambda effects: self._times * effects.chunks.get(name, 0.0))

    @property
    def _times(self) -> int:
        return _OF_METRICS if self.lower is None else _OF_LOWERED

    def _allowed(self, error: float, measured: Callable[[EvaluationEffects], float]) -> float:
        if error <= self.unmeasured or not math.isfinite(error):
            return self.unmeasured
        if self._effects is None:
            self._effects = self._measured()
        return max(self.unmeasured, measured(self._effects))

    def _measured(self) -> EvaluationEffects:
        right, means = self.right, means_of(self.right)
        of_means, of_chunks = dict.fromkeys(means, 0.0), dict.fromkeys(means, 0.0)
        for number in range(max(_LEAST, -(-_ENOUGH // max(len(right), 1)))):
            with torch.no_grad(), perturbed_parameters(self.reference, number, whole=not rounds_partial_sums(self.reference.plan)):  # fmt: skip
                moved = self.again()
            for name, value in means_of(moved).items():
                of_means[name] = max(of_means[name], metric_error(value, means[name]))
                of_chunks[name] = max(of_chunks[name], *(error for _, error in chunk_errors(moved, right, name)))  # fmt: skip
        return EvaluationEffects(means=of_means, chunks=of_chunks)


def metric_errors(ours: Mapping[str, float], chunks: Evaluated, tolerances: EvaluationTolerances, step: int) -> list[TensorError]:  # fmt: skip
    """Of every metric its mean, and the chunk that is farthest off for its tolerance. ours, chunks: the plan's."""
    found: list[TensorError] = []
    for name, value in means_of(tolerances.right).items():
        error = metric_error(ours.get(name, math.nan), value)
        found.append(_error_of(name, error, tolerances.of_mean(name, error), tolerances, step))
        chunk, error = max(
            chunk_errors(chunks, tolerances.right, name), key=lambda each: each[1], default=(None, 0.0)
        )
        if chunk is not None:
            what = f"{name} of chunk {chunk.chunk} of batch {chunk.batch}"
            found.append(_error_of(what, error, tolerances.of_chunk(name, error), tolerances, step))
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


def _error_of(name: str, error: float, allowed: float, tolerances: EvaluationTolerances, step: int) -> TensorError:  # fmt: skip
    return TensorError(
        name=name, kind="metric", step=step, error=error, tolerance=allowed, moved=allowed > tolerances.unmeasured
    )  # fmt: skip
