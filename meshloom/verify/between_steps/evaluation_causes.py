"""The likely cause of metrics that differ: one device's, evaluated or averaged in ways that would be wrong, of which one gives the plan's
numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import Cause
from meshloom.verify.reference.between_steps.evaluation import (
    EvaluatedChunk,
    MetricPlace,
    evaluated_chunks,
    means_of,
)
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import having

_LEFT = 0.1  # of a difference, that a cause may leave
_MOST = 16  # replicas, chunks, batches, that are tried one by one


Numbers = Mapping[str | MetricPlace, float]  # the mean of a metric, by its name; what a chunk adds to it


@dataclass(frozen=True, kw_only=True)
class WrongMetrics:
    """Numbers of a plan's evaluation that differ from one device's, `right`, after `updates` updates. allowed: the tolerance of each. sizes: what it is at least
    relative to. batches: of the evaluation; None: all. averages: what evaluations see in place of parameters."""

    ours: Numbers
    right: Numbers
    allowed: Numbers
    sizes: Numbers
    reference: Reference
    updates: int
    batches: int | None
    averages: AverageErrors | None

    def seen(self) -> AbstractContextManager[None]:
        """A context in which one device has the parameters that evaluations see."""
        averages, parameters = self.averages, self.reference.parameters
        return averages.in_place_of(parameters) if averages else nullcontext()

    def numbers(self, training: Collection[nn.Module] = (), **others: Any) -> Numbers:
        """One device's, with these modules in training mode. others: of `evaluated_chunks`."""
        return numbers_of(
            evaluated_chunks(self.reference, self.updates, self.batches, training=training, **others)
        )

    def allowed_of_chunks(self) -> dict[str, float]:
        """By metric that differs, in its mean or in a chunk, how far a chunk may be off."""
        found: dict[str, float] = {}
        for key, right in self.right.items():
            allowed = self.allowed[key]
            if not metric_error(self.ours.get(key, math.nan), right, self.sizes[key]) <= allowed:
                found.setdefault(key if isinstance(key, str) else key.metric, allowed)
        return found

    def fits(self, numbers: Numbers) -> bool:
        """Whether these are the plan's: within the tolerances, and all but a small part of what differs, which is something."""
        explains = False
        for key, value in numbers.items():
            ours, right = self.ours.get(key, math.nan), self.right[key]
            allowed, size = self.allowed[key], self.sizes[key]
            differs = not metric_error(ours, right, size) <= allowed
            left = _LEFT * abs(ours - right) if differs and math.isfinite(ours - right) else math.inf
            if not metric_error(ours, value, size) <= allowed or abs(ours - value) > left:
                return False
            explains = explains or differs
        return explains


def numbers_of(chunks: Sequence[EvaluatedChunk]) -> dict[str | MetricPlace, float]:
    """Of an evaluation."""
    found: dict[str | MetricPlace, float] = {**means_of(chunks)}
    for each in chunks:
        for name, (value, _) in each.sums.items():
            found[MetricPlace(batch=each.batch, chunk=each.chunk, metric=name)] = value
    return found


def cause_of_metrics(wrong: WrongMetrics) -> Cause | None:
    """None: no way that is tried gives all of the plan's metrics."""
    with wrong.seen():
        chunks = evaluated_chunks(wrong.reference, wrong.updates, wrong.batches)
    # an average of chunks that are wrong themselves may be near the plan's by chance
    same = {
        key: value
        for key, value in numbers_of(chunks).items()
        if not isinstance(key, str) and key in wrong.ours
    }
    averaged: list[tuple[str, str, Numbers]] = [
        (kind, what, {**metrics, **same}) for kind, what, metrics in _ways_to_average(chunks, wrong.reference)
    ]
    for kind, what, metrics in (*averaged, *_ways_to_evaluate(wrong)):
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


def metric_error(ours: float, right: float, size: float = 0.0) -> float:
    """How far a number is off, relative to the larger of one device's and of `size`."""
    if ours == right or (math.isnan(ours) and math.isnan(right)):
        return 0.0
    size = max(abs(right), size)
    return abs(ours - right) / size if size and math.isfinite(ours - right) else math.inf


def _ways_to_average(
    chunks: Sequence[EvaluatedChunk], reference: Reference
) -> Iterator[tuple[str, str, Numbers]]:
    """Of one device's chunks."""
    dp, m, right = reference.plan.dp, reference.plan.microbatches, means_of(chunks)
    for times in dict.fromkeys((dp, m, dp * m)):
        if times > 1:
            much = {name: times * value for name, value in right.items()}
            little = {name: value / times for name, value in right.items()}
            yield (
                "scale",
                f"{times} times one device's: sums over replicas or chunks are not divided",
                _numbers(much),
            )
            yield "scale", f"1/{times} of one device's: means are divided once more", _numbers(little)
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
        yield (
            "mean of means",
            f"the plain mean of the {what}' means: their weights are ignored",
            _numbers(plain),
        )
        for number, (mine, group) in enumerate(zip(of_groups, groups.values(), strict=True)):
            rest = [each for each in chunks if each not in group]
            yield "not reduced", f"those of number {number} of the {what} alone", _numbers(mine)
            yield "missing chunk", f"without those of number {number} of the {what}", _numbers(means_of(rest))


def _numbers(means: Mapping[str, float]) -> Numbers:
    return {**means}


def _ways_to_evaluate(wrong: WrongMetrics) -> Iterator[tuple[str, str, Numbers]]:
    reference = wrong.reference
    if wrong.averages:
        yield "averages", "those of the parameters, and not of their averages", wrong.numbers()
    for when, values in (("before the last update", reference.before), *reference.earlier.items()):
        if values:
            with having(reference, values):
                yield "stale", f"those of the weights {when}: what was updated is not used", wrong.numbers()
    with wrong.seen():
        everything = list(reference.model.modules())
        yield "forward", "those of modules in training mode", wrong.numbers(everything)
        what = "those whose draws go on after those of the metric before, and do not begin anew"
        yield "same draws", what, wrong.numbers(anew=False)
        what = "those of forwards that find in attributes what the forward before on their replica has left there"
        for numbers in _if_possible(wrong, goes_on=True):
            yield "buffers", what, numbers
        for what, told in _ways_to_tell(wrong.updates, _num_batches(wrong)):
            for numbers in _if_possible(wrong, told=told):
                yield "turns", f"those in which meshloom.step() is {what}", numbers


def _if_possible(wrong: WrongMetrics, **others: Any) -> Iterator[Numbers]:
    """One device's numbers; none where the job's own code refuses what is wrong, such as the state of a batch of another size."""
    found: Numbers | None = None
    with suppress(Exception):
        found = wrong.numbers(**others)
    if found is not None:
        yield found


def _num_batches(wrong: WrongMetrics) -> int:
    return 1 + max((each.batch for each in wrong.right if not isinstance(each, str)), default=0)


def _ways_to_tell(updates: int, batches: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Numbers of steps that metrics may be told, by the number of a batch; those that no batch tells apart are one way.

    >>> [(what, [told(batch) for batch in range(2)]) for what, told in _ways_to_tell(1, 2)]
    [('the number of the batch', [0, 1]), ('0, or one less than the number of updates', [0, 0]), ('one more than the number of updates', [2, 2])]
    """
    ways: dict[str, Callable[[int], int]] = {
        "the number of the batch": lambda batch: batch,
        "0": lambda batch: 0,
        "one less than the number of updates": lambda batch: updates - 1,
        "one more than the number of updates": lambda batch: updates + 1,
    }
    alike: dict[tuple[int, ...], list[str]] = {(updates,) * batches: []}
    for what, told in ways.items():
        alike.setdefault(tuple(map(told, range(batches))), []).append(what)
    yield from ((", or ".join(each), ways[each[0]]) for each in alike.values() if each)


def _ways_of_module(wrong: WrongMetrics, name: str, tensor: str | None) -> Iterator[tuple[str, str, Numbers]]:
    reference = wrong.reference
    modules = dict(reference.model.named_modules())
    if (module := modules.get(name)) is None:
        return
    alike = [each for each in modules.values() if type(each) is type(module)]
    with wrong.seen():
        yield "forward", f"those with {name} in training mode", wrong.numbers(list(module.modules()))
        if len(alike) > 1:
            what = f"those with every {type(module).__name__} in training mode"
            yield "forward", what, wrong.numbers(alike)
    own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
    own = [key for key in own if tensor in (None, key)]
    ways: list[tuple[str, str, Mapping[str, Tensor]]] = []
    if wrong.averages:
        now = {key: reference.parameters[key].detach().clone() for key in own if key in reference.parameters}
        ways.append(("averages", "as it is, and not its average", now))
    for when, values in (("before the last update", reference.before), *reference.earlier.items()):
        ways.append(("stale", f"{when}", values))
    for kind, what, values in ways:
        known = [key for key in own if key in values]
        for names in [[key] for key in known] + ([known] if len(known) > 1 else []):
            with wrong.seen(), having(reference, {key: values[key] for key in names}):
                yield kind, f"those of {' and '.join(names)} {what}", wrong.numbers()
