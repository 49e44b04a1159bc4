"""Outputs of one device's modules compared with what ranks say of theirs, which run programs: sums of each rank's part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshloom.verify.compared.compare_chunks import OutputSteps, output_error
from meshloom.verify.reference.step_records import ModuleOutput

# whether it is a part of what ranks have together; total, sum of squares, elements, ramp of `ModuleOutput`; of a part the ramp is what
# it adds to the whole's, None where that is not known
Value = tuple[bool, float, float, int, float | None]
Values = Mapping[str, Sequence[Value]]  # by module


def first_wrong_value(
    outputs: Sequence[ModuleOutput], of_ranks: Sequence[Values], tolerance: float
) -> str | None:
    """The first module, in one device's order, whose output differs from what ranks say; None: all agree that ranks have. outputs: one
    device's; of several calls of a module the last counts."""
    steps = OutputSteps(tolerance)
    return next(
        (right.name for ours, right in _pairs_of_values(outputs, of_ranks) if steps.differs(ours, right)),
        None,
    )


def _pairs_of_values(
    outputs: Sequence[ModuleOutput], of_ranks: Sequence[Values]
) -> Iterator[tuple[ModuleOutput, ModuleOutput]]:
    """What ranks say of a module and what one device does, of modules of which ranks have as many elements."""
    last = {output.name: (number, output) for number, output in enumerate(outputs)}
    # in the order of these last calls
    for name, (_, right) in sorted(last.items(), key=lambda each: each[1][0]):
        for values in _together([each[name] for each in of_ranks if name in each]):
            parts = [value for value in values if value[0]]
            ours = _added(name, right.call, parts) if parts else _of_call(right, values)
            if name and ours.count == right.count:
                yield ours, right


def _of_call(right: ModuleOutput, values: Sequence[Value]) -> ModuleOutput:
    """What ranks have whole; of a module that is called several times, in stages of several ranks perhaps, what is nearest."""
    found = [_added(right.name, right.call, [value]) for value in values]
    return min(found, key=lambda each: output_error(each, right)) if right.call else found[0]


def _together(of_ranks: Sequence[Sequence[Value]]) -> list[tuple[Value, ...]]:
    """Values of all ranks that have one, in order."""
    return list(zip(*of_ranks, strict=False)) if of_ranks else []


def _added(name: str, call: int, values: Sequence[Value]) -> ModuleOutput:
    _, totals, squares, counts, ramps = zip(*values, strict=True)
    known = [each for each in ramps if each is not None]
    return ModuleOutput(
        name=name, call=call, total=sum(totals), square=sum(squares), count=sum(counts), ramp=sum(known) if len(known) == len(values) else None,
    )  # fmt: skip
