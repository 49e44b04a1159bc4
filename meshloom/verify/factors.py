"""The factor that explains numbers that differ: a dozen hypotheses, each told only where it gives the plan's numbers, to the tolerances of the tensors that differ.

With G_c the gradient of chunk c's loss sum, w_c its weight and W the sum of weights, one device has B, the sum of all G_c / W. A plan may have

    dp * B, m * B, tp * B, W * B     not divided by it       B - G_c / W, B + G_c / W     a chunk is missing, or counts twice
    B / dp, B / m, B / tp, B / W     divided once more       G of replica r / W           not reduced
    B of the step before, B + it     stale by a step         B of chunks that draw alike  equal dropout masks

Where gradients agree, their norm may be that of a part of the model, and an update one device's of gradients that are not clipped, at another
rate, or with another decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.replica.model_state import shown_names
from meshloom.verify.reference.float64_blocks import Subsampled
from meshloom.verify.reference.reruns import ChunkGradients

_FEW = 2  # elements, which one number fits by chance


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A gradient or update that differs, of both sides, subsampled. tolerance: of its error, relative to its norm. before: the parameter before its
    update."""

    name: str
    ours: Tensor
    right: Tensor
    tolerance: float
    before: Tensor | None = None


Expected = Callable[[Wrong], Tensor]  # what the plan has of a tensor by a hypothesis
Hypotheses = Iterator[tuple[str, Expected]]


def of_gradients(
    wrong: Sequence[Wrong], plan: Plan, chunks: Sequence[ChunkGradients], before: Subsampled, alike: Mapping[str, Subsampled]
) -> str:  # fmt: skip
    """The hypothesis that gives all wrong gradients, as a sentence; "": none does. chunks: one device's, one by one. before: its averaged gradients
    of the step before. alike: those of chunks that draw alike, by what they draw."""
    found = _nearest(wrong, _of_gradients(plan, chunks, before, alike))
    return f"The gradients of {_names(wrong)} are {found}." if found else ""


def of_updates(wrong: Sequence[Wrong], clipped_by: float) -> str:
    """The same of wrong updates of equal gradients. clipped_by: by what one device's clipping divides gradients."""
    if sum(each.right.numel() for each in wrong) <= _FEW:
        return ""
    found = _nearest(wrong, _of_updates(wrong, clipped_by))
    return f"The gradients agree, and the updates of {_names(wrong)} are {found}." if found else ""


def of_norm(norm: float, right: float, tolerance: float, norms: Mapping[str, float], dp: int) -> str:
    """The same of the norm of equal gradients. norms: of each, in the order of the model.

    >>> of_norm(4.0, 5.0, 1e-6, {"first": 3.0, "second": 4.0}, 1)
    'The gradients agree, and their norm, by which they are clipped, is that without first.'
    """
    squares = {what: math.sqrt(value) for what, value in _squares(right, norms, dp) if value > 0}
    off = {what: abs(norm - value) / value for what, value in squares.items()}
    what = min(off, key=lambda each: off[each], default="")
    if not what or not off[what] <= tolerance:
        return ""
    return f"The gradients agree, and their norm, by which they are clipped, is {what}."


def _of_gradients(
    plan: Plan, chunks: Sequence[ChunkGradients], before: Subsampled, alike: Mapping[str, Subsampled]
) -> Hypotheses:
    dp, m, total = plan.dp, plan.microbatches, sum(each.weight for each in chunks)
    numbers: dict[float, list[str]] = {}
    for number, what in (
        (dp, "dp"), (m, "microbatches"), (dp * m, "dp * microbatches"), (plan.tp, "tp"), (total, "the weight of the batch")
    ):  # fmt: skip
        if number not in (0, 1):
            numbers.setdefault(number, []).append(what)
    for number, names in numbers.items():
        what = " = ".join(names)
        yield (
            f"{what} = {number:g} times one device's: they are not divided by it, or added up once more",
            _sum(number),
        )
        yield (
            f"one device's divided by {what} = {number:g}: they are divided by it once more",
            _sum(1 / number),
        )
    yield "those of the step before: they are stale", _sum(0, 1, before)
    yield "one device's and those of the step before: these are not zeroed", _sum(1, 1, before)
    for each in chunks if len(chunks) > 1 and total else ():
        chunk, rest = "+".join(map(str, each.chunks)), total - each.weight
        yield f"those without chunk {chunk}", _sum(1, -1 / total, each.gradients)
        if rest > 0:
            yield f"those of all chunks but {chunk}", _sum(total / rest, -1 / rest, each.gradients)
        yield f"those with chunk {chunk} twice", _sum(1, 1 / total, each.gradients)
    for replica, own in _replicas(chunks, plan).items():
        weight = sum(each.weight for each in own)
        for divisor in dict.fromkeys([total, weight, total / dp]):
            if divisor:
                expected = _sum(0, 1 / divisor, *(each.gradients for each in own))
                yield f"those of replica {replica} alone: they are not reduced", expected
    for what, gradients in alike.items():
        yield f"those of {what}: their random draws, such as dropout masks, are equal", _sum(0, 1, gradients)


def _of_updates(wrong: Sequence[Wrong], clipped_by: float) -> Hypotheses:
    times = fitted([(each.ours, each.right) for each in wrong])
    unclipped = clipped_by > 1 and math.isclose(times, clipped_by, rel_tol=1e-3)
    why = "gradients are not clipped" if unclipped else "another rate"
    yield f"{times:.6g} times one device's: {why}", _sum(times)
    before = [(each, each.before) for each in wrong if each.before is not None]
    decay = fitted([(each.ours - each.right, start) for each, start in before])
    starts = {each.name: start for each, start in before}
    yield f"one device's and {decay:.6g} times the parameters: another decay", _sum(1, decay, starts)


def _squares(right: float, norms: Mapping[str, float], dp: int) -> Iterator[tuple[str, float]]:
    """What the norm may be, and its square."""
    whole, first, modules = right**2, 0.0, dict[str, float]()
    if dp > 1:
        yield f"the sum of those of dp = {dp} replicas", dp**2 * whole
        yield f"that of the gradients of dp = {dp} replicas", dp * whole
    for name, each in norms.items():
        yield f"that without {name}", whole - each**2
        yield f"that with {name} twice", whole + each**2
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0.0) + each**2
    for module, square in modules.items():
        if first:  # as a stage has them
            yield f"that of what is before {module} alone", first
            yield f"that of {module} and what is behind it alone", whole - first
        first += square
        yield f"that without {module}", whole - square


def _nearest(wrong: Sequence[Wrong], hypotheses: Hypotheses) -> str:
    if not wrong or _left(wrong, lambda each: each.right) <= 1:  # what is subsampled of them agrees
        return ""
    found = [(said, _left(wrong, expected)) for said, expected in hypotheses]
    said, left = min(found, key=lambda each: each[1])
    return said if left <= 1 else ""


def _left(wrong: Sequence[Wrong], expected: Expected) -> float:
    """The largest error that a hypothesis leaves, as a share of its tolerance."""
    shares: list[float] = []
    for each in wrong:
        there = expected(each)
        size = each.tolerance * max(float(there.norm()), float(each.right.norm()))
        shares.append(float((each.ours - there).norm()) / (size or 1e-300))
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def _sum(right: float, times: float = 0.0, *others: Subsampled) -> Expected:
    """`right` times one device's and so many times each of the others."""

    def expected(each: Wrong) -> Tensor:
        found = [given for one in others if (given := one.get(each.name)) is not None]
        return sum((times * given for given in found), right * each.right)

    return expected


def fitted(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """How many times the second of each pair the first is, by least squares over all; NaN if all of these are 0."""
    square = sum(float(other.square().sum()) for _, other in pairs)
    return sum(float((one * other).sum()) for one, other in pairs) / square if square else math.nan


def _replicas(chunks: Sequence[ChunkGradients], plan: Plan) -> dict[int, list[ChunkGradients]]:
    """Their chunks; none where one forward has chunks of several, or there is one."""
    found: dict[int, list[ChunkGradients]] = {}
    for each in chunks if plan.dp > 1 and not plan.sync_batch_norm else ():
        found.setdefault(each.chunks[0] // plan.microbatches, []).append(each)
    return found


def _names(wrong: Sequence[Wrong]) -> str:
    return shown_names([each.name for each in wrong])
