"""What ranks say of an evaluation, and of modules in programs, held against one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from meshloom.verify.compared.compare_chunks import first_wrong
from meshloom.verify.reference.step_records import ModuleOutput
from meshloom.verify.stage_outputs import ModuleSums, Values, pairs_of_values


def test_programs_are_placed_by_their_values():
    right = [
        ModuleOutput(name=name, call=0, total=total, square=total**2, count=4, ramp=0.5 * total)
        for name, total in (("first", 2.0), ("last", 1.0), ("", 1.0))
    ]

    def part(total: float, square: float) -> list[ModuleOutput]:
        return [ModuleOutput(name="first", call=0, total=total, square=square, count=2)]

    # two ranks, each with half of what `first` outputs, and all of what `last` does
    last = [right[1]]
    halves: list[Values] = [
        {"first": part(1.2, 3.0), "last": last},
        {"first": part(0.8, 1.0), "last": last},
    ]
    assert first_wrong(pairs_of_values(right, halves), 1e-5) is None
    wrong: list[Values] = [halves[0], {"first": part(0.7, 1.0)}]
    assert first_wrong(pairs_of_values(right, wrong), 1e-5) == "first"


def test_a_value_within_a_module_is_not_its_output():
    """The sum before a norm at the end of a module was compared with what the norm makes of it, which may be almost the same; the norm
    may be in another stage."""

    def node(name: str, path: str) -> Any:
        return SimpleNamespace(name=name, path=path, target=torch.ops.aten.add.Tensor)

    ended_by_norm, ending_itself = node("add", "block"), node("add_1", "wide")
    stages: Any = [
        SimpleNamespace(number=0, program=SimpleNamespace(nodes=[node("linear", "block.linear"), ended_by_norm, node("mul", "wide")])),
        SimpleNamespace(number=1, program=SimpleNamespace(nodes=[node("norm", "block.norm"), node("relu", "wide.relu"), ending_itself])),
    ]  # fmt: skip
    first, second = ModuleSums({}, lambda: stages), ModuleSums({}, lambda: stages)
    for sums, stage in ((first, stages[0]), (second, stages[1])):
        for each in stage.program.nodes:
            sums.visit(stage.number, each, torch.ones(3))
    # "wide" is cut between the stages, so what it has come to in the first is not its output
    assert set(first.found) == {"block.linear"}
    assert set(second.found) == {"block.norm", "wide.relu", "wide"}
