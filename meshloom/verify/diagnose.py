"""Names the usual cause that explains why a plan's step differs from one device's, in one sentence.

Everything is derived from the two records and, once something differs, from each chunk's own gradient
(`mistakes.py`). Order:

    draws, data, weights      facts of the chunks: what went in is different
    gradients                 a mistake that explains them, to a small part of the difference
    norm, update              the gradients agree: what follows them is wrong
    loss, buffers, replicas   the rest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.core.units import plural
from meshloom.verify.compare import FLOOR, Comparison
from meshloom.verify.compare_chunks import filled
from meshloom.verify.reference.mistakes import Cause, Evidence, mistakes, subsample, subsample_each
from meshloom.verify.reference.step_records import ChunkRecord, StepRecord

Part = Mapping[str, Tensor]  # thinned gradients by name
Expected = Callable[[str], Tensor]  # name -> thinned gradient


def diagnose(
    comparison: Comparison,
    ours: StepRecord,
    one: StepRecord,
    evidence: Evidence,
    earlier: Sequence[Comparison] = (),
) -> list[Cause]:
    """Likely causes of a step's difference, likeliest first; one of kind "unknown" when none fits; none if
    nothing differs."""
    if comparison.passed:
        return []
    causes = [*_from_draws(ours, one, evidence.plan), *_from_data(ours, one, evidence.plan)]
    gradients = comparison.failed("gradient")
    if gradients and not causes:
        causes += [*_from_missing(ours, one, gradients), *_from_gradients(comparison, ours, one, evidence)]
    if not gradients:
        causes += _from_norm(comparison, ours, one, evidence) or _from_update(
            comparison, one, evidence, earlier
        )
    if not causes and not gradients and comparison.failed("loss"):
        causes.append(
            Cause(
                "loss",
                f"All gradients agree, but the loss is reported as {ours.loss:.6g} instead of {one.loss:.6g}: it is averaged otherwise.",
            )
        )
    if not causes and comparison.failed("buffer"):
        names = _names(comparison.failed("buffer"))
        causes.append(
            Cause(
                "batch statistics",
                f"Only buffers differ ({names}): running statistics are not composed over all chunks in their order.",
            )
        )
    if len(set(ours.replicas)) > 1:
        causes.append(
            Cause(
                "replicas",
                "The replicas do not hold the same parameters and buffers after the step: they drift apart.",
            )
        )
    return causes or [Cause("unknown", f"Unknown cause: {_figures(ours, one, gradients)}.")]


def _from_draws(ours: StepRecord, one: StepRecord, plan: Plan) -> Iterator[Cause]:
    """Chunks must begin with different seeds; those that share a forward (synchronised statistics) with
    one."""
    where = {"the plan": ours, "one device": one}
    for who, record in where.items():
        seeds: dict[int, int] = {}
        for index, chunk in filled(record.chunks).items():
            key = index % plan.microbatches if plan.sync_batch_norm else index
            other = seeds.setdefault(chunk.seed, key)
            if other != key and (chunk.draws or (who == "the plan" and _draws_of(record))):
                what = "use the same random draws, such as dropout masks"
                yield Cause(
                    "same draws",
                    f"Chunks {other} and {key} (replicas {other // plan.microbatches} and {key // plan.microbatches}) {what}, under {who}.",
                )
                return
    here, there = filled(ours.chunks), filled(one.chunks)
    if plan.captures:  # programs key their draws by themselves, and nobody looks on
        return
    wrong = [
        index
        for index in here
        if index in there
        and not plan.sync_batch_norm
        and _same_data(here, there, index)
        and here[index].draws != there[index].draws
    ]
    if wrong:
        yield Cause(
            "same draws",
            f"{_chunks(wrong)}: other random draws than on one device; they depend on something besides seed, step and chunk.",
        )


def _draws_of(record: StepRecord) -> bool:
    return any(chunk.draws for chunk in record.chunks)


def _same_data(here: Mapping[int, ChunkRecord], there: Mapping[int, ChunkRecord], index: int) -> bool:
    return here[index].data == there[index].data


def _from_data(ours: StepRecord, one: StepRecord, plan: Plan) -> Iterator[Cause]:
    here, there = filled(ours.chunks), filled(one.chunks)
    owner = {chunk.data: index for index, chunk in there.items()}
    m = plan.microbatches
    wrong = [index for index in here if index not in there or not _same_data(here, there, index)]
    taken = [(index, owner[here[index].data]) for index in wrong if here[index].data in owner]
    if taken:
        index, other = taken[0]
        again = other in here and here[other].data == here[index].data
        end = (
            "which runs them too: replicas share data, and other samples are never read"
            if again
            else "in place of its own"
        )
        yield Cause(
            "data",
            f"Chunk {index} (replica {index // m}) runs the samples of chunk {other} (replica {other // m}), {end}.",
        )
    elif wrong:
        yield Cause(
            "data",
            f"{_chunks(wrong)}: other samples than one device reads; the batch is cut or ordered otherwise, or a sample is not the same twice.",
        )
    elif missing := [index for index in there if index not in here]:
        yield Cause("data", f"{_chunks(missing)}: not computed at all under the plan.")
    elif not plan.sync_batch_norm:
        unequal = [
            index
            for index in there
            if not math.isclose(here[index].weight, there[index].weight, rel_tol=1e-6)
        ]
        for index in unequal[:1]:
            yield Cause(
                "weights",
                f"Chunk {index} counts {here[index].weight:g} instead of {there[index].weight:g}: the mean is weighted wrongly.",
            )


def _from_missing(ours: StepRecord, one: StepRecord, names: Sequence[str]) -> Iterator[Cause]:
    lost = [
        name for name in names if ours.gradients.get(name) is None and one.gradients.get(name) is not None
    ]
    if lost:
        yield Cause("None or zero", f"{_names(lost)}: a gradient on one device and none under the plan.")
    extra = [
        name for name in names if one.gradients.get(name) is None and ours.gradients.get(name) is not None
    ]
    if extra:
        yield Cause(
            "None or zero",
            f"{_names(extra)}: a gradient under the plan and none on one device, where nothing uses it; optimizers tell zero from none.",
        )


def _from_gradients(
    comparison: Comparison, ours: StepRecord, one: StepRecord, evidence: Evidence
) -> list[Cause]:
    a, b = subsample_each(ours.gradients), subsample_each(one.gradients)
    failed = [
        name for name in comparison.failed("gradient") if a.get(name) is not None and b.get(name) is not None
    ]
    theirs = {name: each for name in failed if (each := a[name]) is not None}
    right = {name: each for name in failed if (each := b[name]) is not None}
    if not theirs:
        return []
    broken = [name for name, each in theirs.items() if not bool(each.isfinite().all())]
    if broken:
        return [Cause("unknown", f"Unknown cause: the gradient of {_names(broken)} is not finite.")]
    passed = {error.name for error in comparison.errors if error.kind == "gradient" and error.passed}
    sizes = {name: float(each.norm()) for name, each in b.items() if each is not None}
    # One that is nothing but rounding agrees whatever went wrong, and says nothing.
    everything = not any(
        name in passed and size > FLOOR * max(sizes.values()) for name, size in sizes.items()
    )
    who = "All gradients are" if everything else f"The gradients of {_names(failed)} are"
    error = _distance(theirs, lambda name: right[name])
    rounding = 0.1 * min(each.tolerance for each in comparison.errors if each.kind == "gradient")
    best, cause = math.inf, None
    for candidate, expected in _candidates(evidence, one, theirs, right, everything, who):
        left = _distance(theirs, expected)
        # What is left must be small beside the difference, and much less than a simpler explanation leaves.
        if left <= 0.03 * error and left < 0.1 * best and best > rounding:
            best, cause = left, candidate
    return [cause] if cause else _from_mixture(theirs, error, evidence)


def _candidates(
    evidence: Evidence, one: StepRecord, theirs: Part, right: Part, everything: bool, who: str
) -> Iterator[tuple[Cause, Expected]]:
    """Explanations and the gradients they give, simple ones first."""
    tied = [name for name in right if name in evidence.tied]
    if tied and len(tied) == len(right):
        uses = 1 + max(len(evidence.tied[name]) for name in tied)
        others = ", ".join(other for name in tied for other in evidence.tied[name])
        yield (
            Cause(
                "tied",
                f"{who} {uses} times one device's: a parameter tied to {others} is counted once per name.",
            ),
            lambda name: uses * right[name],
        )
    for mistake in mistakes(evidence, everything):
        if everything or mistake.partial:
            yield (
                Cause(mistake.kind, f"{who} {mistake.description}."),
                _mixed(evidence, mistake.factors, right),
            )
    if evidence.unsynchronised is not None:
        sentence = (
            f"{who} those with each replica's own batch statistics, which the plan says to synchronise."
        )
        yield Cause("batch statistics", sentence), _from_named(evidence.unsynchronised, right)
    if evidence.chained is not None:
        sentence = f"{who} those of a forward that reads buffers which the chunk before wrote, not as the step found them."
        yield Cause("buffers", sentence), _from_named(evidence.chained, right)
    if evidence.previous is not None:
        old = {name: _or_zero(evidence.previous.get(name), each) for name, each in right.items()}
        share = _dot({name: theirs[name] - right[name] for name in right}, old) / (_dot(old, old) or math.inf)
        sentence = f"{who} one device's plus {share:.3g} times those of the step before: old gradients are not zeroed."
        yield Cause("stale", sentence), lambda name: right[name] + share * old[name]
    factor = _dot(theirs, right) / (_dot(right, right) or math.inf)
    if (
        evidence.clip
        and everything
        and one.gradient_norm
        and math.isclose(factor * one.gradient_norm, evidence.clip, rel_tol=1e-3)
    ):
        yield (
            Cause(
                "clipping",
                f"{who} clipped to {evidence.clip:g} before they are handed over: clipped too early, or twice.",
            ),
            lambda name: factor * right[name],
        )
    elif everything or len(right) > 1:
        yield (
            Cause("scale", f"{who} {factor:.6g} times one device's: they are divided by a wrong number."),
            lambda name: factor * right[name],
        )


def _mixed(evidence: Evidence, factors: Sequence[float], right: Part) -> Expected:
    def expected(name: str) -> Tensor:
        total = torch.zeros_like(right[name])
        for factor, chunk in zip(factors, evidence.chunks, strict=True):
            part = chunk.gradients.get(name)
            if part is not None and factor:
                total += factor * part
        return total

    return expected


def _from_named(gradients: Mapping[str, Tensor | None], right: Part) -> Expected:
    return lambda name: _or_zero(gradients.get(name), right[name])


def _from_mixture(theirs: Part, error: float, evidence: Evidence) -> list[Cause]:
    """No usual mistake fits: with which factors the chunks' gradients enter, if a mixture of them it is."""
    total = sum(chunk.weight for chunk in evidence.chunks)
    columns = [
        torch.cat([_or_zero(chunk.gradients.get(name), each) for name, each in theirs.items()])
        for chunk in evidence.chunks
    ]
    target = torch.cat(list(theirs.values()))
    if target.numel() < 2 * len(columns):
        return []
    matrix = torch.stack(columns, 1) / total
    factors = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    if float((matrix @ factors - target).norm() / target.norm()) > 0.03 * error:
        return []
    shown = [
        f"{'+'.join(map(str, chunk.chunks))}: {factor:.3g}"
        for chunk, factor in zip(evidence.chunks, factors.tolist(), strict=True)
    ]
    what = f"the gradients of {_names(list(theirs))} mix the chunks with wrong factors (chunk: factor, where 1 is right)"
    return [Cause("unknown", f"Unknown cause: {what} {_list(shown)}.")]


def _from_norm(comparison: Comparison, ours: StepRecord, one: StepRecord, evidence: Evidence) -> list[Cause]:
    """The gradients agree but their norm does not."""
    norm, right = ours.gradient_norm, one.gradient_norm
    if not comparison.failed("norm") or norm is None or not right:
        return []
    of = f"The gradients agree, but their norm, by which they are clipped, is {norm:.6g} instead of {right:.6g}"
    names = [name for name in evidence.tied if name in evidence.norms]
    tied = sum(len(evidence.tied[name]) * evidence.norms[name] ** 2 for name in names)
    if tied and math.isclose(norm, math.sqrt(right**2 + tied), rel_tol=1e-4):
        return [Cause("tied", f"{of}: tied parameters ({_names(names)}) are counted once per name.")]
    if any(
        math.isclose(norm, factor * right, rel_tol=1e-4)
        for factor in (evidence.plan.dp, math.sqrt(evidence.plan.dp))
        if factor > 1
    ):
        return [
            Cause(
                "clipping",
                f"{of}: the norms of all dp = {evidence.plan.dp} replicas are added, though they hold the same gradient.",
            )
        ]
    rest = (
        "a part of the model is left out, such as what other ranks own"
        if norm < right
        else "a part of the model is counted more than once"
    )
    return [Cause("clipping", f"{of}: {rest}.")]


def _from_update(
    comparison: Comparison, one: StepRecord, evidence: Evidence, earlier: Sequence[Comparison]
) -> list[Cause]:
    """Gradients and norm agree but the parameters do not."""
    wrong = {*comparison.failed("update"), *comparison.failed("parameter")}
    names = list(dict.fromkeys(error.name for error in comparison.errors if error.name in wrong))
    if not names:
        return []
    untrained = [name for name in names if one.gradients.get(name) is None]
    if len(untrained) == len(names):
        return [
            Cause(
                "optimizer",
                f"{_names(names)}: changed under the plan otherwise than on one device, though without a gradient.",
            )
        ]
    some = f"those of {_names(names)}" if len(names) < len(one.gradients) else "all of them"
    if earlier:
        when = f"The gradients agree, and so did all updates until step {comparison.step}, where updates differ ({some})"
        return [
            Cause(
                "optimizer",
                f"{when}: the optimizer's state or schedule is wrong, such as the state of another rank or parameter.",
            )
        ]
    clipped = evidence.clip is not None and (one.gradient_norm or 0.0) > evidence.clip
    hint = (
        "clipped to another norm, or the optimizer has other settings"
        if clipped
        else "the optimizer has other settings or other parameters"
    )
    return [
        Cause(
            "clipping" if clipped and len(names) > 1 else "optimizer",
            f"The gradients agree but the updates differ from the first step on ({some}): {hint}.",
        )
    ]


def _distance(theirs: Part, expected: Expected) -> float:
    """||theirs - expected|| / ||theirs||."""
    square = sum(float((each - expected(name)).square().sum()) for name, each in theirs.items())
    return (
        math.sqrt(square) / (math.sqrt(_dot(theirs, theirs)) or 1e-300) if math.isfinite(square) else math.inf
    )


def _dot(a: Part, b: Part) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in b)


def _or_zero(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _figures(ours: StepRecord, one: StepRecord, failed: Sequence[str]) -> str:
    shown: list[str] = []
    for name in failed[:3]:
        a, b = ours.gradients.get(name), one.gradients.get(name)
        if a is not None and b is not None and a.shape == b.shape:
            a, b = subsample(a), subsample(b)
            ratio = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
            rest = float((a - ratio * b).norm() / a.norm().clamp_min(1e-300))
            shown.append(
                f"the gradient of {name} is {ratio:.4g} times one device's, and {rest:.2g} of it is something else"
            )
    return "; ".join(shown) or "no usual mistake explains the difference"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _chunks(indices: Sequence[int]) -> str:
    return f"{plural('Chunk', len(indices))} {_list([str(index) for index in indices])}"


def _list(shown: Sequence[str]) -> str:
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
