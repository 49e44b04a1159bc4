"""The program of every family equals eager, however it is read and run, or is refused with the line that
stands in its way.

Nine families, each in some of the ways, run in the covering subset; all of them, each in three of the ways in
turn, are `slow`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from captured import check_against_eager
from torch import Tensor

from meshloom.core.errors import CaptureError
from meshloom.parameters.unfilled_model import comparable
from meshloom.program.capture.check import check_against_module
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program
from meshloom.program.trace.precision import build_model
from tests.covering import in_turn
from tests.families import FAMILIES
from tests.families.limits import FLOAT32_ONLY, NOT_READ
from tests.families.programs import RUN_ON, WAYS, batches_of, differs_by, job_in, lifted_eager, limit_of, read

COVERING = {
    "gpt2": ("bfloat16, dropout",),
    "llama": ("float64",),
    "t5": ("lifted",),
    "beit": ("float32",),
    "resnet": ("bfloat16", "evaluation"),
    "mamba": ("float32",),
    "mixer": ("dropout",),
    "lstm": ("dropout",),
    "diffusion": ("float64",),
}
QUICK_REFUSALS = {"autoformer", "vilt", "batch_norm", "switch_transformers"}
READ = [name for name in FAMILIES if name not in NOT_READ]
IN_TURN = in_turn(READ, list(WAYS), 3)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def test_nearly_all_are_read():
    assert len(READ) >= 110 and len(NOT_READ) <= 10
    assert set(NOT_READ) <= set(FAMILIES) and set(COVERING) <= set(READ)
    assert {way for ways in COVERING.values() for way in ways} == set(WAYS)


def test_every_kind_of_family_meets_every_way():
    kinds = {FAMILIES[name].kind for name in READ} - {"segmentation"}  # which are two
    assert {(FAMILIES[name].kind, way) for name, way in IN_TURN} >= set(itertools.product(kinds, WAYS))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name, way in dict.fromkeys(
            [*((name, way) for name, ways in COVERING.items() for way in ways), *IN_TURN]
        )
        if not (WAYS[way].dtype == torch.float64 and name in FLOAT32_ONLY)
    ],
)
@pytest.mark.slow
def test_program_equals_eager(name: str, way: str):
    family = FAMILIES[name]
    program = read(family, WAYS[way])
    assert differs_by(program, family, WAYS[way]) <= limit_of(family, WAYS[way])
    # casts to float32 inside of eager, which the lifted program does not make, have 24 bits
    if WAYS[way].lifted:
        assert differs_by(program, family, WAYS[way], casts_stay=True) <= 1e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK_REFUSALS else pytest.mark.slow) for name in NOT_READ],
)
def test_refused_with_the_reason_and_the_line(name: str):
    with pytest.raises(CaptureError) as refused:
        read(FAMILIES[name], WAYS["float32"])
    message = str(refused.value)
    assert re.search(NOT_READ[name], message), message
    assert (
        re.search(r"tests/(families/(family|layers)|jobs)\.py:\d+ \(return ", message) and "\n" not in message
    )
    assert message.endswith("Plans with dp and zero alone run the module as it is and need no program.")


# --- Both comparisons see a program that is not the model.


def _scaled(program: Program, node: Node) -> Program:
    """The program with 1.001 times the value of `node` where it is used."""
    scaled = replace(
        node,
        name=f"{node.name}_scaled",
        target=torch.ops.aten.mul.Tensor,
        args=(Ref(node.name), 1.001),
        kwargs={},
        draw=None,
        num_draws=0,
    )
    place = program.nodes.index(node) + 1
    rest = [replace(each, args=_renamed(each.args, node.name, scaled.name)) for each in program.nodes[place:]]
    return replace(program, nodes=(*program.nodes[:place], scaled, *rest))


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, tuple):
        parts: Any = [_renamed(each, old, new) for each in value]
        return tuple(parts)
    return Ref(new) if value == Ref(old) else value


def _first(program: Program, operator: str) -> Node:
    return next(node for node in program.nodes if node.operator == operator)


def _with_another_draw(program: Program) -> Program:
    """One more draw in front of the others: a dropout with another mask."""
    dropout = _first(program, "dropout")
    twice = replace(dropout, name="unused")
    place = program.nodes.index(dropout)
    return replace(program, nodes=(*program.nodes[:place], twice, *program.nodes[place:]))


def _detached(program: Program) -> Program:
    """A gradient that ends at the first norm, with the same loss."""
    norm = _first(program, "layer_norm")
    place = program.nodes.index(norm) + 1
    cut = replace(norm, name="cut", target=torch.ops.aten.detach.default, args=(Ref(norm.name),), kwargs={})
    rest = [replace(each, args=_renamed(each.args, norm.name, "cut")) for each in program.nodes[place:]]
    return replace(program, nodes=(*program.nodes[:place], cut, *rest))


def _of_another_block(program: Program) -> Program:
    """Two blocks with each other's weights."""
    parameters = dict(program.parameters)
    one, other = (
        next(key for key, each in parameters.items() if each.name.endswith(f"h.{n}.mlp.c_fc.weight"))
        for n in (0, 1)
    )
    first, second = parameters[one], parameters[other]
    parameters[one], parameters[other] = (
        replace(first, value=second.value),
        replace(second, value=first.value),
    )
    return replace(program, parameters=parameters)


PLANTED: dict[str, tuple[str, Callable[[Program], Program]]] = {
    "a value": ("gpt2", lambda program: _scaled(program, _first(program, "layer_norm"))),
    "a draw": ("gpt2", _with_another_draw),
    "a gradient": ("gpt2", _detached),
    "a weight": ("gpt2", _of_another_block),
    "a buffer": ("conv2d", lambda program: replace(program, updates=dict(list(program.updates.items())[1:]))),
}


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.slow
def test_a_program_that_is_not_the_model_is_found(planted: str):
    name, change = PLANTED[planted]
    way = WAYS["dropout"]
    family = FAMILIES[name]
    job, program = job_in(family, way), read(family, way)
    check_against_eager(program, job, batches_of(job, RUN_ON))
    wrong = change(program)
    assert differs_by(wrong, family, way) > 1e-4 > limit_of(family, way)
    with pytest.raises(CaptureError, match="The captured program differs from the model"):
        check_against_eager(wrong, job, batches_of(job, RUN_ON))
    # and where the model's parameters share memory
    with comparable(lambda: build_model(job, program.precision, training=True), torch.device("cpu")) as model:
        check_against_module(program, model, job.loss, batches_of(job, RUN_ON))
        with pytest.raises(CaptureError, match="The captured program differs from the model"):
            check_against_module(wrong, model, job.loss, batches_of(job, RUN_ON))


def test_eager_is_lifted_call_by_call():
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with lifted_eager():
        values: list[Tensor] = [
            x.float(),
            x.to(torch.float32),
            x.sum(dtype=torch.float32),
            torch.ones(2, dtype=torch.float32),
            x.bfloat16(),
        ]
        number = torch.tensor(0.1)
    assert {value.dtype for value in values} == {torch.float64} and torch.equal(values[0], x)
    assert number.dtype == torch.float64 and number.item() == torch.tensor(0.1, dtype=torch.float32).item()
    assert x.float().dtype == torch.float32
