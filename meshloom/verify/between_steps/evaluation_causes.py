"""The likely cause of metrics that differ: one device's, evaluated or averaged in ways that would be wrong, of which one gives the plan's
numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, evaluated_chunks, means_of
from meshloom.verify.reference.mistakes import Cause, CauseKind
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import having

_LEFT = 0.1  # of a difference, that a cause may leave
_MOST = 16  # replicas, chunks, batches, that are tried one by one


@dataclass(frozen=True, kw_only=True)
class WrongMetrics:
    """Metrics of a plan that differ from one device's, `right`, after `updates` updates. allowed: the tolerance of each. batches: of the evaluation; None: all.
    averages: what evaluations see in place of parameters."""

    ours: Mapping[str, float]
    right: Mapping[str, float]
    allowed: Mapping[str, float]
    reference: Reference
    updates: int
    batches: int | None
    averages: AverageErrors | None

    def seen(self) -> AbstractContextManager[None]:
        """A context in which one device has the parameters that evaluations see."""
        averages, parameters = self.averages, self.reference.parameters
        return averages.in_place_of(parameters) if averages else nullcontext()

    def metrics(self, training: Collection[nn.Module] = ()) -> dict[str, float]:
        """One device's, with these modules in training mode."""
        return means_of(evaluated_chunks(self.reference, self.updates, self.batches, training=training))

    def fits(self, metrics: Mapping[str, float]) -> bool:
        """Whether these are the plan's metrics: within the tolerances, and all but a small part of what differs."""
        for name, value in metrics.items():
            ours, right = self.ours.get(name, math.nan), self.right[name]
            differs = not metric_error(ours, right) <= self.allowed[name]
            left = _LEFT * abs(ours - right) if differs and math.isfinite(ours - right) else math.inf
            if not metric_error(ours, value) <= self.allowed[name] or abs(ours - value) > left:
                return False
        return True


def cause_of_metrics(wrong: WrongMetrics) -> Cause | None:
    """None: no way that is tried gives all of the plan's metrics."""
    with wrong.seen():
        chunks = evaluated_chunks(wrong.reference, wrong.updates, wrong.batches)
    for kind, what, metrics in (*_ways_to_average(chunks, wrong.reference), *_ways_to_evaluate(wrong)):
        if wrong.fits(metrics):
            return Cause(kind, f"All metrics are {what}.")
    return None


def cause_in_module(wrong: WrongMetrics, name: str, tensor: str | None) -> Cause | None:
    """The same of ways in which this module alone is evaluated, which is the first that differs. tensor: its parameter or buffer that
    does."""
    for kind, what, metrics in _ways_of_module(wrong, name, tensor):
        if wrong.fits(metrics):
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


def _ways_to_evaluate(wrong: WrongMetrics) -> Iterator[tuple[CauseKind, str, dict[str, float]]]:
    reference = wrong.reference
    if wrong.averages:
        yield "averages", "those of the parameters, and not of their averages", wrong.metrics()
    for when, values in (("before the last update", reference.before), *reference.earlier.items()):
        if values:
            with having(reference, values):
                yield "stale", f"those of the weights {when}: what was updated is not used", wrong.metrics()
    with wrong.seen():
        everything = list(reference.model.modules())
        yield "forward", "those of modules in training mode", wrong.metrics(everything)


def _ways_of_module(
    wrong: WrongMetrics, name: str, tensor: str | None
) -> Iterator[tuple[CauseKind, str, dict[str, float]]]:
    reference = wrong.reference
    modules = dict(reference.model.named_modules())
    if (module := modules.get(name)) is None:
        return
    alike = [each for each in modules.values() if type(each) is type(module)]
    with wrong.seen():
        yield "forward", f"those with {name} in training mode", wrong.metrics(list(module.modules()))
        if len(alike) > 1:
            what = f"those with every {type(module).__name__} in training mode"
            yield "forward", what, wrong.metrics(alike)
    own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
    own = [key for key in own if tensor in (None, key)]
    ways: list[tuple[CauseKind, str, Mapping[str, Tensor]]] = []
    if wrong.averages:
        now = {key: reference.parameters[key].detach().clone() for key in own if key in reference.parameters}
        ways.append(("averages", "as it is, and not its average", now))
    for when, values in (("before the last update", reference.before), *reference.earlier.items()):
        ways.append(("stale", f"{when}", values))
    for kind, what, values in ways:
        known = [key for key in own if key in values]
        for names in [[key] for key in known] + ([known] if len(known) > 1 else []):
            with wrong.seen(), having(reference, {key: values[key] for key in names}):
                yield kind, f"those of {' and '.join(names)} {what}", wrong.metrics()
