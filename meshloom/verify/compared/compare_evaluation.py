"""What ranks say of an evaluation; and where one goes wrong whose metrics differ: the first chunk and metric that do, and in it the first module.

every chunk         its data, and the sum and weight of each metric, of all ranks
the first wrong     what modules have and output, in the order of the program
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshloom.verify.between_steps.checks import Cause
from meshloom.verify.compared.compare_chunks import OutputSteps, other_ways
from meshloom.verify.compared.compare_values import Values, first_wrong_value, pairs_of_values
from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, MetricPlace
from meshloom.verify.reference.step_records import ModuleOutput
from meshloom.verify.tolerances.evaluation_errors import chunk_errors

_CHUNK = 4  # times a metric's tolerance, that a chunk's part may be off where another is off by more
_LARGE = 0.01  # of the largest error of a chunk, below which one is rounding beside it


@dataclass(frozen=True, kw_only=True)
class SeenMetric:
    """What one rank that computes a metric of a chunk sees in it. outputs: of modules that run as they are, and before them the
    parameters and buffers that they have. values: of modules in programs. training: modules in training mode. has_parts: whether the metric's
    own operators are divided, so that ranks add up parts."""

    outputs: Sequence[ModuleOutput] = ()
    values: Values | None = None
    training: Sequence[str] = ()
    has_parts: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values."""
        return asdict(self)

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> SeenMetric:
        """The inverse of `to_dict`, also after a round trip through JSON."""
        outputs = [ModuleOutput(**each) for each in given["outputs"]]
        return SeenMetric(
            outputs=outputs,
            values=given["values"],
            training=given["training"],
            has_parts=given.get("has_parts", False),
        )


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """metrics: of the first `batches`, None: of all. chunks: of all ranks. watched: what ranks see in each metric of the first chunk of each
    replica. lent: of ranks that share parameters, what they have of these while metrics are computed. changed: names of parameters, buffers and
    modules' modes that are others after it. disagree: what ranks have of metrics, if it is not the same, a sentence each."""

    what: str
    metrics: Mapping[str, float]
    batches: int | None
    chunks: Sequence[EvaluatedChunk] = ()
    watched: Sequence[tuple[MetricPlace, SeenMetric]] = ()
    lent: Sequence[LentParameters] = ()
    changed: Sequence[str] = ()
    disagree: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class LentParameters:
    """What one rank has, as metrics are computed, of parameters that several ranks along pp hold. holders: those ranks, the owner first.
    seen, before: digests, then and before the evaluation, by name. alike: the other places of the rank in the mesh."""

    rank: int
    alike: Sequence[int]
    holders: Mapping[str, Sequence[int]]
    seen: Mapping[str, str]
    before: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class FoundMetric:
    """What the chunks of an evaluation say. first: the first metric that differs, in the order of the data; None: all agree. pair: its
    value there under the plan and on one device. causes: facts, which explain the rest."""

    first: MetricPlace | None
    pair: tuple[float, float] = (0.0, 0.0)
    causes: Sequence[Cause] = ()


@dataclass(frozen=True, kw_only=True)
class PlacedMetric:
    """Where a metric goes wrong. module: the first one; None: outputs of all modules agree, or are not known. tensor: its parameter or
    buffer, if that differs before its forward. training: modules that are in training mode under the plan alone. has_parts: as a rank has it. ways: in which
    the module is called otherwise than on one device."""

    module: str | None = None
    tensor: str | None = None
    training: Sequence[str] = ()
    has_parts: bool = False
    ways: str = ""


def find_metric(
    ours: Sequence[EvaluatedChunk], right: Sequence[EvaluatedChunk], allowed: Mapping[str, float]
) -> FoundMetric:
    """Of the plan's chunks and of one device's. allowed: the tolerances of the metrics that differ."""
    here = {(each.batch, each.chunk): each for each in ours}
    there = {(each.batch, each.chunk): each for each in right}
    causes = [*wrong_data(ours, right)]
    errors: dict[MetricPlace, float] = {}
    pairs: dict[MetricPlace, tuple[float, float]] = {}
    for name, tolerance in allowed.items():
        for place, error in chunk_errors(ours, right, name):
            key = place.batch, place.chunk
            (a, weight), (b, right_weight) = here[key].sums[name], there[key].sums[name]
            if not math.isclose(weight, right_weight, rel_tol=1e-6):
                causes.append(Cause("weights", _weighed(place, weight, right_weight)))
            if not error <= tolerance:
                errors[place], pairs[place] = error, (_mean(a, weight), _mean(b, right_weight))
    least = _LARGE * min(max(errors.values(), default=0.0), 1.0)
    order = {name: number for number, name in enumerate(allowed)}
    clear = [place for place, error in errors.items() if not error <= _CHUNK * allowed[place.metric]]
    large = [place for place in clear or errors if not errors[place] < least]
    first = min(large, key=lambda each: (each.batch, each.chunk, order[each.metric]), default=None)
    if first is None:
        return FoundMetric(first=None, causes=causes[:1] or [_ADDED_UP])
    return FoundMetric(first=first, pair=pairs[first], causes=causes[:1])


_ADDED_UP = Cause(
    "loss",
    "Evaluated once more, the metrics of every chunk agree with one device's: it is adding them up over chunks and ranks, or dividing, that is wrong.",
)


def place_metric(
    seen: Sequence[SeenMetric],
    right: tuple[Sequence[ModuleOutput], Sequence[str]],
    tensors: Collection[str],
    tolerance: float,
) -> PlacedMetric:
    """The first module of a metric that differs. seen: by the ranks that compute it. right: one device's outputs, and its modules in
    training mode. tensors: names of parameters and buffers. tolerance: of outputs on equal parameters."""
    outputs, modes = right
    training = [name for each in seen[:1] for name in each.training if name not in modes]
    for each in seen:
        if (name := _first_output(each.outputs, outputs, tensors, tolerance)) is not None:
            tensor = name if name in tensors else None
            module = name.rpartition(".")[0] if tensor else name
            ways = "" if tensor else other_ways(module, zip(each.outputs, outputs, strict=False))
            return PlacedMetric(
                module=module or "the whole model", tensor=tensor, training=training, ways=ways
            )
    of_modules = [each for each in outputs if each.name not in tensors]
    module = first_wrong_value(of_modules, [each.values for each in seen if each.values], tolerance)
    return PlacedMetric(module=module, training=training, has_parts=any(each.has_parts for each in seen))


def pairs_of_outputs(
    seen: SeenMetric, right: Sequence[ModuleOutput]
) -> Iterator[tuple[int, ModuleOutput, ModuleOutput]]:
    """What a rank sees of a module, and one device, with its number there. What has another size there is a part."""
    if seen.values:
        yield from pairs_of_values(right, [seen.values])
    for number, (here, there) in enumerate(zip(seen.outputs, right, strict=False)):
        if here.name == there.name and here.count == there.count:
            yield number, here, there


def wrong_loans(lent: Sequence[LentParameters]) -> Iterator[tuple[str, Cause]]:
    """Parameters of which a rank that borrows has another value than their owner, as metrics are computed, and why."""
    by_place = {(*each.alike, each.rank): each for each in lent}
    for place, each in by_place.items():
        for name, (owner, *_) in each.holders.items():
            there = by_place.get((*place[:-1], owner))
            if (
                there is None
                or name not in each.seen
                or each.seen[name] == there.seen.get(name, each.seen[name])
            ):
                continue
            what = f"As metrics are computed, {name} of the stage of rank {each.rank} along pp, which borrows it, is another value than on rank {owner}, which owns it"
            why = "what its owner has is not lent"
            if each.seen[name] == each.before.get(name) and there.seen[name] != there.before.get(name):
                why = "it is as in steps, and its owner has its average: averages are not lent"
            yield name, Cause("averages", f"{what}: {why}.")


def cause_of_modes(placed: PlacedMetric) -> Cause | None:
    """Of modules that are in training mode under the plan alone."""
    if not (training := placed.training):
        return None
    names = ", ".join(name or "the model" for name in training[:3]) + (", ..." if len(training) > 3 else "")
    are = "are" if len(training) > 1 else "is"
    return Cause("forward", f"{names} {are} in training mode in the evaluation, and not on one device.")


def cause_of_place(found: FoundMetric, placed: PlacedMetric, *, observed: bool) -> Cause | None:
    """What the place says; None: nothing. observed: whether all modules were, in the order of the program."""
    place, (ours, right) = found.first, found.pair
    if place is None:
        return None
    of = f"{place.metric} of chunk {place.chunk} of batch {place.batch} is {ours:.6g}, and {right:.6g} on one device"
    if placed.tensor:
        why = f"{placed.tensor} is the first value that differs: what evaluations are given in its place, or gather, is not what updates have left"
        return Cause("stale", f"{of}, and in it {why}.")
    if placed.module:
        why = (
            placed.ways
            or "it, or an operation before it, computes something else than on one device, or is sent something else"
        )
        return Cause("forward", f"{of}, and in it the output of {placed.module} is the first that differs: {why}.")  # fmt: skip
    if observed:
        parts = ", of which each rank along tp computes a part," if placed.has_parts else ""
        what = f"what the metric makes of them{parts} is another number"
        return Cause("loss", f"{of}, and in it the outputs of all modules agree: {what}.")
    return None


def wrong_data(ours: Sequence[EvaluatedChunk], right: Sequence[EvaluatedChunk]) -> Iterator[Cause]:
    """Chunks that are not those of one device, or have other data."""
    here = {(each.batch, each.chunk): each for each in ours}
    there = {(each.batch, each.chunk): each for each in right}
    owners = {each.data: f"chunk {chunk} of batch {batch}" for (batch, chunk), each in there.items()}
    for batch, chunk in sorted({*here, *there}):
        what = f"Chunk {chunk} of batch {batch} of the evaluation"
        if (batch, chunk) not in here:
            yield Cause("data", f"{what} is not evaluated under the plan.")
        elif (batch, chunk) not in there:
            yield Cause("data", f"{what} is evaluated under the plan alone.")
        elif (data := here[batch, chunk].data) != there[batch, chunk].data:
            others = f"that of {owners[data]}" if data in owners else "another than one device reads"
            yield Cause("data", f"{what} has other data, {others}: it is read, split or moved to the device in another way.")  # fmt: skip
        elif here[batch, chunk].seed != there[batch, chunk].seed:
            others = [
                f"chunk {each.chunk} of batch {each.batch}"
                for each in right
                if each.seed == here[batch, chunk].seed
            ]
            seed = f"the seed of {others[0]}" if others else "another seed than on one device"
            yield Cause("data", f"{what} draws from {seed}.")


def _weighed(place: MetricPlace, ours: float, right: float) -> str:
    of = f"{place.metric} of chunk {place.chunk} of batch {place.batch}"
    return (
        f"{of} counts with weight {ours:g}, and with {right:g} on one device: the mean is weighted wrongly."
    )


def _first_output(
    ours: Sequence[ModuleOutput], right: Sequence[ModuleOutput], tensors: Collection[str], tolerance: float
) -> str | None:
    steps = OutputSteps(tolerance)
    for here, there in zip(ours, right, strict=False):
        elsewhere = here.name == there.name and here.name in tensors and here.count != there.count
        if not elsewhere and steps.differs(here, there):
            return there.name
    return None


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
