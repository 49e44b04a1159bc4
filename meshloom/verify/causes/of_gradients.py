"""Causes of wrong gradients: a mistake that reproduces them all but for a small part, in all of their elements or in those that are wrong;
else where in the step they go wrong, or what their elements look like."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.causes.of_elements import from_elements, names_of
from meshloom.verify.causes.of_factors import factors_of_each
from meshloom.verify.causes.of_forwards import (
    differing_chunks,
    from_backward,
    from_forward,
    repeated_chunks,
)
from meshloom.verify.causes.of_reruns import (
    mixed,
    of_exchanged_parts,
    of_leftovers,
    of_other_reductions,
    of_other_runs,
    of_owners,
    of_tied_uses,
    parts_of_replicas,
)
from meshloom.verify.causes.of_tensors import from_exchanged, from_mixture, from_places, from_rounding
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.reference.mistakes import Cause, Evidence, mistakes, subsample_each
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.gradient_errors import FLOOR

Gradients = Mapping[str, Tensor]  # subsampled, by name
AnyGradients = Mapping[str, Tensor | None]
Expected = Callable[[str], Tensor]  # name -> subsampled gradient
_LEFT = 0.03  # of the difference, that a cause may leave unexplained, where chunks that run again round to a lower precision
_EXACT = 3e-3  # of it, where they don't
_BETTER = 0.1  # of what a simpler cause leaves, that another one may leave
_MOST_WRONG = 0.95  # of the elements, up to which the rest is right
_CERTAIN = 1e-3  # of the difference, up to which a cause needs no better one
_FEW = 3  # elements that one factor may explain


def from_gradients(
    comparison: Comparison, ours: StepRecord, reference: StepRecord, evidence: Evidence
) -> list[Cause]:
    """The likeliest cause; none if nothing fits."""
    wrong = _Wrong.of(comparison.errors, ours.gradients, reference.gradients, evidence.plan)
    wrong = replace(wrong, left=_LEFT) if reference.casts else wrong
    actual, right = wrong.actual, wrong.right
    if not actual:
        return []
    broken = [name for name, each in actual.items() if not bool(each.isfinite().all())]
    if broken:
        return [Cause("unknown", f"Unknown cause: the gradient of {names_of(broken)} is not finite.")]
    of_rows = [each.name for each in comparison.errors if each.name in actual and math.isinf(each.error)]
    rounding = min(each.tolerance for each in comparison.errors if each.kind == "loss")
    if of_rows and wrong.error <= rounding:  # of sparse gradients
        return [_of_rows(of_rows, evidence)]
    if comparison.first_output is None and not differing_chunks(comparison, ours, reference):
        # what changes a forward changes a loss
        if not any(bool(each.any()) for each in actual.values()):
            return [_of_zeros(wrong, evidence)]
        evidence = replace(evidence, others=[run for run in evidence.others if run.kind != "forward"])
    mixture = from_mixture(actual, wrong.error, evidence)
    named = next((cause for cause in mixture if cause.kind != "unknown"), None)
    parts = parts_of_replicas(evidence, right)
    found = (
        repeated_chunks(comparison, ours, reference)
        or _best(_all_candidates(wrong, evidence, reference.gradient_norm), actual, wrong, rounding)[1]
        or from_elements(actual, right, wrong.everything, evidence.transposed)
        or _in_some_elements(evidence, wrong, rounding)
        or of_owners(evidence, actual, right)
        or named
        or from_forward(comparison, ours, reference, evidence)
        or from_backward(comparison, reference, evidence, wrong.sizes)
        or from_rounding(actual, right)
        or (from_rounding(actual, right, parts) if parts else None)
        or from_places(actual, right)
    )
    return [found] if found else mixture


def _of_zeros(wrong: _Wrong, evidence: Evidence) -> Cause:
    """All that is wrong is zero, which several mistakes would give where chunks add nothing."""
    found: dict[str, str] = {}
    for mistake in mistakes(evidence, wrong.all_wrong):
        if mistake.kind not in found and (wrong.all_wrong or mistake.partial):
            expected = mixed(evidence, mistake.factors, wrong.right)
            if any(mistake.factors) and not any(bool(expected(name).any()) for name in wrong.right):
                found[mistake.kind] = mistake.description
    also = f" So would be {', or '.join([*found.values()][:3])}." if found else ""
    return Cause("scale", f"{wrong.who} 0 times one device's: they are lost.{also}", explains=True)


def _of_rows(names: Sequence[str], evidence: Evidence) -> Cause:
    """names: of sparse gradients that have other rows."""
    what = f"The gradient of {names_of(names)} has the values of one device's, and other rows"
    lost, more = (
        [row for name in names for row in evidence.rows.get(name, ((), ()))[side]] for side in (0, 1)
    )
    why = "rows count as used that no sample uses, or the other way round, and optimizers update those"
    if more and not lost:
        why = f"rows count as used that no sample uses ({_shown(more)}), and optimizers update those"
    elif lost and not more:
        why = f"rows that samples use are lost ({_shown(lost)}), and optimizers do not update those"
    return Cause("None or zero", f"{what}: {why}.", explains=True)


def _shown(rows: Sequence[int]) -> str:
    return f"{len(rows)}, such as row {rows[0]}" if len(rows) > 1 else f"row {rows[0]}"


def is_explained(
    errors: Sequence[TensorError],
    ours: AnyGradients,
    reference: AnyGradients,
    evidence: Evidence,
    rounding: float,
) -> bool:
    """Whether what is known explains the wrong gradients up to `rounding`, so that no other runs are needed. ours: subsampled."""
    wrong = _Wrong.of(errors, ours, reference, evidence.plan)
    if not wrong.actual or not all(bool(each.isfinite().all()) for each in wrong.actual.values()):
        return True
    return _best(_all_candidates(wrong, evidence, None), wrong.actual, wrong, rounding)[0] <= max(
        rounding, _CERTAIN * wrong.error
    )


@dataclass(frozen=True, kw_only=True)
class _Wrong:
    """The wrong gradients of a step, subsampled: the plan's and one device's. everything, sizes: one device's gradients and their norms.
    who: they, as the beginning of a sentence. error: relative to theirs. left: of it, that a cause may leave."""

    actual: Gradients
    right: Gradients
    everything: AnyGradients
    sizes: Mapping[str, float]
    all_wrong: bool
    who: str
    error: float
    left: float

    @staticmethod
    def of(errors: Sequence[TensorError], ours: AnyGradients, reference: AnyGradients, plan: Plan) -> _Wrong:
        a, b = subsample_each(ours), subsample_each(reference)
        of_gradients = [error for error in errors if error.kind == "gradient"]
        failed = [error.name for error in of_gradients if not error.passed]
        actual = {
            name: each for name in failed if b.get(name) is not None and (each := a.get(name)) is not None
        }
        right = {name: each for name in actual if (each := b[name]) is not None}
        passed = {error.name for error in of_gradients if error.passed}
        sizes = {name: float(each.norm()) for name, each in b.items() if each is not None}
        # A gradient of pure rounding always agrees, so it is no evidence.
        largest = max(sizes.values(), default=0.0)
        all_wrong = not any(name in passed and size > FLOOR * largest for name, size in sizes.items())
        who = "All gradients are" if all_wrong else f"The gradients of {names_of(actual)} are"
        return _Wrong(
            actual=actual, right=right, everything=b, sizes=sizes, all_wrong=all_wrong, who=who,
            error=_distance(actual, lambda name: right[name]) if actual else 0.0,
            left=_EXACT if plan.precision == "float32" else _LEFT,
        )  # fmt: skip


def _all_candidates(
    wrong: _Wrong, evidence: Evidence, norm: float | None
) -> Iterator[tuple[Cause, Expected]]:
    return chain(
        from_exchanged(wrong.actual, wrong.right, wrong.everything),
        of_exchanged_parts(evidence, wrong.actual, wrong.right, wrong.everything),
        _candidates(evidence, norm, wrong.actual, wrong.right, wrong.all_wrong, wrong.who),
    )


def _best(
    candidates: Iterator[tuple[Cause, Expected]], actual: Gradients, wrong: _Wrong, rounding: float
) -> tuple[float, Cause | None]:
    """The cause that leaves least of the error of `wrong` unexplained, if that is little, and what it leaves. actual: those that it is to give,
    or their elements that are wrong. rounding: what need not be explained."""
    best, cause, error = math.inf, None, wrong.error
    for candidate, expected in candidates:
        left = _distance(actual, expected)
        # The residual must be small beside the difference, and far below that of simpler explanations.
        if error and left <= wrong.left * error and left < _BETTER * best and best > rounding:
            best, cause = left, candidate
    if cause is None:
        return best, None
    share = max(0.0, 1 - best / error)
    return best, Cause(
        cause.kind, f"{cause.sentence} This explains {share:.2%} of the difference.", explains=True
    )


def _in_some_elements(evidence: Evidence, all_wrong: _Wrong, rounding: float) -> Cause | None:
    """A mistake that reproduces the wrong elements of gradients of which others are right; where they are beside each other, it
    is at the border of two parts."""
    actual, right = all_wrong.actual, all_wrong.right
    wrong = {
        name: (each - right[name]).abs() > 1e-6 * right[name].abs().max() for name, each in actual.items()
    }
    share = sum(int(each.sum()) for each in wrong.values()) / sum(map(torch.numel, wrong.values()))
    if not 0 < share <= _MOST_WRONG:
        return None

    def only(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {
            name: None if (each := gradients.get(name)) is None else each[places]
            for name, places in wrong.items()
        }

    chunks = [replace(each, gradients=only(each.gradients)) for each in evidence.chunks]
    previous = None if evidence.previous is None else only(evidence.previous)
    known = replace(
        evidence,
        chunks=chunks,
        previous=previous,
        unsynchronised=None,
        chained=None,
        others=(),
        without_hooks=(),
        uses=(),
    )
    ours = {name: each[wrong[name]] for name, each in actual.items()}
    one = {name: each[wrong[name]] for name, each in right.items()}
    those = replace(all_wrong, error=_distance(ours, lambda name: one[name]))
    who = f"{share:.0%} of the elements of the gradients of {names_of(list(wrong))} are wrong. They are"
    _, found = _best(_candidates(known, None, ours, one, False, who), ours, those, rounding)
    place = from_places(actual, right)
    if found and place:
        return Cause(place.kind, f"{place.sentence} {found.sentence}")
    return found and replace(found, explains=False)


def _candidates(
    evidence: Evidence, norm: float | None, actual: Gradients, right: Gradients, all_wrong: bool, who: str
) -> Iterator[tuple[Cause, Expected]]:
    """Possible causes and the gradients they would give, simple ones first. norm: of one device's whole gradient."""
    tied = [name for name in right if name in evidence.tied]
    if tied and len(tied) == len(right):
        uses = 1 + max(len(evidence.tied[name]) for name in tied)
        others = ", ".join(other for name in tied for other in evidence.tied[name])
        sentence = f"{who} {uses} times one device's: a parameter tied to {others} is counted once per name."
        yield Cause("tied", sentence), lambda name: uses * right[name]
    yield from of_tied_uses(evidence, actual, right)
    yield from of_other_runs(replace(evidence, others=evidence.without_hooks), right, who)
    yield from of_leftovers(evidence, right, who)
    for mistake in mistakes(evidence, all_wrong):
        if all_wrong or mistake.partial:
            expected = mixed(evidence, mistake.factors, right)
            yield Cause(mistake.kind, f"{who} {mistake.description}."), expected
    if evidence.unsynchronised is not None:
        sentence = (
            f"{who} those with each replica's own batch statistics, which the plan says to synchronise."
        )
        yield Cause("batch statistics", sentence), _from_named(evidence.unsynchronised, right)
    if evidence.chained is not None:
        sentence = f"{who} those of a forward that reads the buffers that the chunk before wrote, not those at the start of the step."
        yield Cause("buffers", sentence), _from_named(evidence.chained, right)
    if evidence.previous is not None:
        old = {name: _or_zeros(evidence.previous.get(name), each) for name, each in right.items()}
        share = _dot({name: actual[name] - right[name] for name in right}, old) / (_dot(old, old) or math.inf)
        sentence = f"{who} one device's plus {share:.3g} times those of the step before: old gradients are not zeroed."
        yield Cause("stale", sentence), lambda name: right[name] + share * old[name]
        sentence = f"{who} those of the step before."
        yield Cause("stale", sentence), lambda name: old[name]
    yield from of_other_runs(evidence, right, who)
    yield from of_other_reductions(evidence, right, who)
    factor = _dot(actual, right) / (_dot(right, right) or math.inf)
    if evidence.clip and all_wrong and norm and math.isclose(factor * norm, evidence.clip, rel_tol=1e-3):
        sentence = f"{who} clipped to {evidence.clip:g} before the exchange: clipped too early, or twice."
        yield Cause("clipping", sentence), lambda name: factor * right[name]
    elif (found := factors_of_each(actual, right, evidence)) is not None:
        yield Cause("scale", f"{who} each a multiple of one device's{found.what}."), found.expected
    elif all_wrong or sum(map(torch.numel, right.values())) > _FEW:
        why = "they are lost" if abs(factor) < 1e-6 else "they are divided or multiplied by a wrong number"
        sentence = f"{who} {factor:.6g} times one device's: {why}."
        yield Cause("scale", sentence), lambda name: factor * right[name]


def _from_named(gradients: Mapping[str, Tensor | None], right: Gradients) -> Expected:
    return lambda name: _or_zeros(gradients.get(name), right[name])


def _distance(actual: Gradients, expected: Expected) -> float:
    """||theirs - expected|| / ||theirs||."""
    square = sum(float((each - expected(name)).square().sum()) for name, each in actual.items())
    return (
        math.sqrt(square) / (math.sqrt(_dot(actual, actual)) or 1e-300) if math.isfinite(square) else math.inf
    )


def _dot(a: Gradients, b: Gradients) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in b)


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor
