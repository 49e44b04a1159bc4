"""Families trained under dp=2,tp=2 equal one device: two steps in float64, dropout on, replicas with chunks
of two and of one sample.

Models this small are left whole by the choice, so their weights are pinned as a division drawn at random has
them; the rest is chosen. One family runs in the covering subset; a third of the others is `slow`, and the
other thirds are trained under the plans of tests/test_grid_families.py. (tests/test_division.py divides every
family, tests/test_stages.py makes a pipeline of every family.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.program.capture.capture import capture
from meshloom.program.trace.precision import default_precision, in_precision
from meshloom.tensor_parallel.layout.cuts import candidates
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.layout.placement import Cut, Part
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import DivisionChoice
from meshloom.tensor_parallel.search.uses import Uses
from meshloom.verify.run import verify
from tests.covering import in_turn
from tests.division import at_random
from tests.families import FAMILIES, Family
from tests.families.limits import NOT_READ
from tests.reports import largest_error

TOLERANCE = 1e-10  # float64; gradients are added up over samples and over ranks in other orders
COVERING = {"opt"}
PLAN_OF = dict(in_turn([name for name in FAMILIES if name not in NOT_READ], ["dp=2,tp=2", "pp=2", "grid"]))

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
read = pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if name in COVERING else pytest.mark.slow, id=name)
        for name, each in FAMILIES.items()
        if name in COVERING or PLAN_OF.get(name) == "dp=2,tp=2"
    ],
)


def test_every_kind_of_family_is_trained_under_every_plan():
    kinds = {FAMILIES[name].kind for name in PLAN_OF} - {"segmentation"}  # which are two
    assert {(FAMILIES[name].kind, plan) for name, plan in PLAN_OF.items()} >= set(
        product(kinds, PLAN_OF.values())
    )


@pytest.mark.slow
@read
def test_replicas_of_divided_models_equal_one_device(family: Family):
    job = replace(family.make_job(True), batch_size=3)
    pins = pins_of(drawn(job, chunk_size=2, num_ranks=2))
    report = verify(
        lifted(job),
        Plan(dp=2, tp=2, tp_placements=pins),
        devices="simulated",
        steps=2,
        dtype=torch.float64,
    )
    assert report is not None
    assert report.passed, report.causes
    assert largest_error(report) <= TOLERANCE
    assert (max(report.owned) < 1) == any(pin != "replicated" for pin in pins.values())


def drawn(job: Job, *, chunk_size: int, num_ranks: int) -> DivisionChoice:
    """Some division of the job's loss."""
    data: Any = job.data()
    batches = [
        default_collate([data[start + index] for index in range(chunk_size)]) for start in (0, chunk_size)
    ]
    program = capture(job, (batches[0], batches[1]), dtype=torch.float64)
    return at_random(0)(layout_of(program, BUILT_IN), num_ranks)


def pins_of(choice: DivisionChoice) -> dict[str, str]:
    """How a division has the matrices (and larger tensors), one of each module: `dimN` or `replicated`.

    All that use them can work with them so, as they are not sent around. Vectors go along with the matrix
    that they are used with.
    """
    layout, numbers = choice.layout, choice.numbers
    cuts: dict[int, list[Cut]] = {}
    for cut in candidates(layout, numbers, choice.num_ranks):
        for number in cut.parts:
            cuts.setdefault(number, []).append(cut)
    uses = Uses(layout, numbers, cuts)
    pins: dict[str, str] = {}
    divided: set[str] = set()  # modules
    for name, each in layout.program.parameters.items():
        placement = choice.input_placements[each.value]
        if len(each.meta.shape) < 2:
            continue
        if (
            not isinstance(placement, Part)
            or placement.cut is None
            or uses.blocking(each.value, placement) is not None
        ):
            pins[name] = "replicated"
            continue
        dims = [
            dim
            for dim, axis in enumerate(layout.values[each.value][0])
            if numbers.leaves(axis) & placement.cut.parts.keys()
        ]
        if len(dims) == 1 and (module := name.rpartition(".")[0]) not in divided:
            divided.add(module)
            pins[name] = f"dim{dims[0]}"
    return pins


def lifted(job: Job) -> Job:
    """The job in float64, with casts to a lower precision inside its loss left out: comparing to 1e-10 asks
    for it."""

    def loss(model: Any, batch: Any) -> Any:
        with _InFloat64(), default_precision(torch.float64):
            return job.loss(model, batch)

    def collate(samples: Any) -> Any:
        return in_precision(default_collate(samples), torch.float64)

    return replace(job, model=lambda: job.model().double(), loss=loss, collate=collate)


class _InFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if func is Tensor.float else func
        return function(*map(_wide, args), **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
