"""Where an evaluation goes wrong: the first metric of a chunk that differs, and in it the first module, from what both sides say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshloom.verify.compared.compare_evaluation import (
    FoundMetric,
    PlacedMetric,
    SeenMetric,
    cause_of_modes,
    cause_of_place,
    find_metric,
    place_metric,
)
from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, MetricPlace
from meshloom.verify.reference.step_records import ModuleOutput
from meshloom.verify.stage_outputs import ModuleSums

ALLOWED = {"loss": 1e-6, "accuracy": 1e-6}


def chunks(**changes: float) -> list[EvaluatedChunk]:
    """Two batches of two chunks of three samples. changes: "b1c0_loss" -> times its value."""
    found: list[EvaluatedChunk] = []
    for batch in range(2):
        for chunk in range(2):
            sums = {
                name: (value * changes.get(f"b{batch}c{chunk}_{name}", 1.0), 3.0)
                for name, value in (("loss", 4.0 + batch + chunk), ("accuracy", 2.0))
            }
            found.append(EvaluatedChunk(batch=batch, chunk=chunk, sums=sums, data=f"{batch}{chunk}"))
    return found


def test_the_first_metric_is_that_of_the_first_batch_and_of_the_job():
    wrong = chunks(b1c0_loss=1.01, b0c1_accuracy=1.01, b0c1_loss=1.01)
    found = find_metric(wrong, chunks(), ALLOWED)
    assert found.first == MetricPlace(batch=0, chunk=1, metric="loss")
    assert found.pair == pytest.approx((5 * 1.01 / 3, 5 / 3))


def test_rounding_beside_a_mistake_is_not_the_first():
    found = find_metric(chunks(b0c0_loss=1 + 3e-6, b1c1_loss=1.01), chunks(), ALLOWED)
    assert found.first == MetricPlace(batch=1, chunk=1, metric="loss")
    found = find_metric(chunks(b0c0_loss=1 + 3e-6), chunks(), ALLOWED)
    assert found.first == MetricPlace(batch=0, chunk=0, metric="loss")


def test_a_nan_is_a_difference_but_not_from_another():
    assert find_metric(chunks(b1c0_loss=math.nan), chunks(), ALLOWED).first is not None
    both = chunks(b1c0_loss=math.nan)
    assert find_metric(both, both, ALLOWED).first is None


def test_chunks_that_agree_leave_adding_up():
    found = find_metric(chunks(), chunks(), ALLOWED)
    assert found.first is None
    assert [each.kind for each in found.causes] == ["loss"]
    assert "adding them up" in found.causes[0].sentence


def test_data_and_weights_are_named():
    ours = chunks()
    ours[1], ours[2] = replace(ours[1], data="10"), replace(ours[2], data="01")
    (cause,) = find_metric(ours, chunks(), ALLOWED).causes
    assert cause.kind == "data" and "Chunk 1 of batch 0" in cause.sentence
    assert "chunk 0 of batch 1" in cause.sentence
    (cause,) = find_metric(chunks()[:3], chunks(), ALLOWED).causes
    assert "Chunk 1 of batch 1 of the evaluation is not evaluated" in cause.sentence
    ours = chunks()
    ours[3] = replace(ours[3], sums={**ours[3].sums, "loss": (6.0, 4.0)})
    (cause,) = find_metric(ours, chunks(), ALLOWED).causes
    assert cause.kind == "weights" and "weight 4, and with 3" in cause.sentence


def output(name: str, total: float, count: int = 4) -> ModuleOutput:
    return ModuleOutput(name=name, call=0, total=total, square=total**2, count=count, ramp=0.5 * total)


RIGHT = [
    output("first.weight", 3.0),
    output("first", 2.0),
    output("last.weight", 5.0),
    output("last", 1.0),
    output("", 1.0),
]
TENSORS = {"first.weight", "last.weight"}


def placed(*wrong: ModuleOutput) -> PlacedMetric:
    """Of outputs that are others than one device's."""
    changed = {each.name: each for each in wrong}
    ours = [changed.get(each.name, each) for each in RIGHT]
    seen = json.loads(json.dumps(SeenMetric(outputs=ours).to_dict()))
    return place_metric([SeenMetric.from_dict(seen)], (RIGHT, []), TENSORS, 1e-5)


def test_the_first_module_is_that_of_the_program():
    assert placed().module is None
    assert placed(output("last", 1.1), output("first", 2.1)).module == "first"
    assert placed(output("", 1.1)).module == "the whole model"


def test_a_parameter_is_its_modules():
    found = placed(output("last.weight", 5.1), output("last", 1.1))
    assert (found.module, found.tensor) == ("last", "last.weight")
    # a slice, where the rest is elsewhere
    assert placed(output("last.weight", 2.0, count=2), output("last", 1.1)).tensor is None


def test_programs_are_placed_by_their_values():
    # two ranks, each with half of what `first` outputs, and all of what `last` does
    halves = [
        {"first": [[True, 1.2, 3.0, 2, None, []]], "last": [[False, 1.0, 1.0, 4, 0.5, []]]},
        {"first": [[True, 0.8, 1.0, 2, None, []]], "last": [[False, 1.0, 1.0, 4, 0.5, []]]},
    ]
    seen = [SeenMetric.from_dict({"outputs": [], "values": each, "training": []}) for each in halves]
    assert place_metric(seen, (RIGHT, []), TENSORS, 1e-5).module is None
    halves[1]["first"] = [[True, 0.7, 1.0, 2, None, []]]
    assert place_metric(seen, (RIGHT, []), TENSORS, 1e-5).module == "first"


def test_modes_and_places_make_sentences():
    here = FoundMetric(first=MetricPlace(batch=0, chunk=1, metric="loss"), pair=(1.5, 1.25))
    assert cause_of_modes(PlacedMetric()) is None
    modes = cause_of_modes(PlacedMetric(module="norm", training=["norm"]))
    assert modes and modes.sentence.startswith("norm is in training mode")
    cause = cause_of_place(here, PlacedMetric(module="norm"), observed=True)
    assert cause and cause.kind == "forward"
    assert "loss of chunk 1 of batch 0 is 1.5, and 1.25 on one device" in cause.sentence
    cause = cause_of_place(here, PlacedMetric(module="norm", tensor="norm.weight"), observed=True)
    assert cause and cause.kind == "stale" and "norm.weight" in cause.sentence
    cause = cause_of_place(here, PlacedMetric(), observed=True)
    assert cause and cause.kind == "loss"
    cause = cause_of_place(here, PlacedMetric(has_parts=True), observed=True)
    assert cause and cause.kind == "loss" and "each rank along tp computes a part" in cause.sentence
    assert cause_of_place(here, PlacedMetric(), observed=False) is None
    assert cause_of_place(FoundMetric(first=None), PlacedMetric(), observed=True) is None


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
