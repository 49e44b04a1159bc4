"""Comparison of two records of a step: data and draws of their chunks, and outputs of modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.step_records import (
    ChunkRecord,
    ModuleOutput,
    StepRecord,
    same_setting,
    shown_setting,
)

_MOST = 8  # facts of one kind
_SUDDEN, _SMALL = 16, 25  # times the errors before; of a tolerance, below which nothing is sudden


def facts_of(ours: StepRecord, reference: StepRecord, plan: Plan, of_losses: float) -> Iterator[str]:
    """Differences that may occur although every tensor agrees, a sentence each. of_losses: the tolerance of losses."""
    if len(set(ours.replicas)) > 1:
        odd = next(replica for replica, digest in enumerate(ours.replicas) if digest != ours.replicas[0])
        which = f", first {ours.apart[0]}" if ours.apart else ""
        yield f"Replicas 0 and {odd} hold different parameters or buffers after step {ours.step}{which}."
    yield from (f"After step {ours.step}, {each}." for each in ours.inconsistent)
    if ours.skipped != reference.skipped:
        which = ("the plan", "one device") if ours.skipped else ("one device", "the plan")
        how = "the gradients of the plan are finite" if ours.skipped else "those of the plan do too"
        yield f"Of step {ours.step} gradients overflow float16 and {which[0]} skips the update, but {which[1]} does not: {how}."
    yield from list(dict.fromkeys(_wrong_settings(ours, reference, of_losses)))[:_MOST]
    if len(ours.chunks) == len(reference.chunks) or not plan.sync_batch_norm:
        yield from _data_facts(ours, reference)


def _wrong_settings(ours: StepRecord, reference: StepRecord, of_losses: float) -> Iterator[str]:
    """Settings in the optimizers' groups after the step that are others than on one device, on any rank. of_losses: tolerance of a loss that a scheduler
    keeps."""
    for what, value in (reference.settings[0] if reference.settings else {}).items():
        for here in (each.get(what, value) for each in ours.settings):
            if not same_setting(what, here, value, of_losses):
                yield f"{what} is {shown_setting(here)} after step {ours.step}, and {shown_setting(value)} on one device."


def module_of_names(names: Sequence[str], reference: StepRecord, plan: Plan) -> str | None:
    """The first module in order of execution that has one of these tensors; None: there are none."""
    place = _order_of_modules(reference, plan)
    first = min(names, key=lambda name: _place_of_owner(name, place), default=None)
    return None if first is None else first.rpartition(".")[0] or "the whole model"


def _data_facts(ours: StepRecord, reference: StepRecord) -> Iterator[str]:
    here, there = _filled(ours.chunks), _filled(reference.chunks)
    for index in sorted({*here, *there}):
        a, b = here.get(index), there.get(index)
        if a is None or b is None or a.samples != b.samples:
            yield f"Chunk {index} has {a.samples if a else 0} samples, and {b.samples if b else 0} on one device."
        elif a.data != b.data:
            yield f"Chunk {index} has other data than on one device."


def _filled(chunks: Sequence[ChunkRecord]) -> dict[int, ChunkRecord]:
    """The non-empty chunks, by index."""
    return {chunk.index: chunk for chunk in chunks if chunk.samples}


def first_module(reference: StepRecord, errors: Sequence[TensorError], plan: Plan) -> str | None:
    """Where all outputs agree: the first module in order of backward, from the last one to the first, whose gradient differs, one that is
    not called (the model itself as well) only if no other does; else the first in order of execution whose buffer, parameter or update does, or whose average."""
    place = _order_of_modules(reference, plan)
    wrong = [(error.kind, error.name) for error in errors if not error.passed]
    owners = {
        _place_of_owner(name, place): name.rpartition(".")[0] for kind, name in wrong if kind == "gradient"
    }
    if owners:  # parameters of the model itself, and of modules that are not called, may be used anywhere
        called = {number: owner for number, owner in owners.items() if owner and owner in place}
        owners = called or owners
        return owners[max(owners)] or "the whole model"
    states = [name for kind, name in wrong if kind in ("buffer", "parameter", "update")]
    return module_of_names(states or [name for kind, name in wrong if kind == "average"], reference, plan)


def first_output(ours: StepRecord, reference: StepRecord, tolerance: float, plan: Plan) -> str | None:
    """The first module in order of execution whose output differs; None: all that were observed agree."""
    here, there = _outputs(ours, plan), _outputs(reference, plan)
    found = first_wrong(((here[key], there[key]) for key in there if key in here), tolerance)
    return None if found is None else found or "the whole model"


def _order_of_modules(record: StepRecord, plan: Plan) -> dict[str, int]:
    """Module -> its place in order of execution."""
    executed = dict.fromkeys(name for _, name, _ in _outputs(record, plan))
    return {name: number for number, name in enumerate(executed)}


def _place_of_owner(name: str, place: Mapping[str, int]) -> int:
    """Place in order of execution of the module that owns a tensor, or of the one around it that is called."""
    module = name.rpartition(".")[0]
    while module not in place and module:
        module = module.rpartition(".")[0]
    return place.get(module, len(place))


def _outputs(record: StepRecord, plan: Plan) -> dict[tuple[int, str, int], ModuleOutput]:
    """Outputs by one device's forward, module and call, in its order of execution; for chunks that are one forward, sums over the chunks. Within a
    program no module runs."""
    forwards = plan.microbatches if plan.sync_batch_norm else plan.num_chunks
    found: dict[tuple[int, str, int], ModuleOutput] = {}
    for chunk in sorted(record.chunks, key=lambda chunk: (chunk.index % forwards, chunk.index)):
        for output in chunk.modules:
            key = chunk.index % forwards, output.name, output.call
            found[key] = add_outputs(found[key], output) if key in found else output
    return found


def add_outputs(a: ModuleOutput, b: ModuleOutput) -> ModuleOutput:
    """The output of one module on the rows of both."""
    return ModuleOutput(
        name=a.name, call=a.call, total=a.total + b.total, square=a.square + b.square, count=a.count + b.count
    )  # fmt: skip


def first_wrong(outputs: Iterable[tuple[ModuleOutput, ModuleOutput]], tolerance: float) -> str | None:
    """The first module, of pairs of a plan's output and one device's in order of execution, that is off by more than `tolerance`, or by much more
    than all before it, as rounding grows bit by bit; None: all agree."""
    largest: float | None = None
    for ours, right in outputs:
        error = output_error(ours, right)
        jumps = largest is not None and error > max(_SUDDEN * largest, tolerance / _SMALL)
        if jumps or not error <= tolerance:
            return right.name
        largest = max(error, largest or 0.0)
    return None


def output_error(a: ModuleOutput, b: ModuleOutput) -> float:
    """How far two outputs differ, relative to their size, judged by their sums."""
    if (a.name, a.call, a.count) != (b.name, b.call, b.count):
        return math.inf
    if not (math.isfinite(a.square) and math.isfinite(b.square)):  # a mask of -inf, or a mistake
        return 0.0 if (str(a.total), str(a.square)) == (str(b.total), str(b.square)) else math.inf
    size = math.sqrt(b.square)
    norm, total = abs(math.sqrt(a.square) - size), abs(a.total - b.total) / math.sqrt(max(b.count, 1))
    off = max(norm, total)
    if a.ramp is not None and b.ramp is not None:
        off = max(off, abs(a.ramp - b.ramp) / math.sqrt(max(b.count, 1)))
    return off / size if size else (math.inf if off else 0.0)
