"""Modules that cannot be read run as they are, as one operator of the program; everything around them is read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.bound import OpaqueModule
from meshloom.program.opaque.call import ChangedCallError
from meshloom.program.opaque.operator import call_of_node, is_opaque
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.verify.run import verify
from tests.covering import few
from tests.opaque_jobs import LENGTH, PARTS, WIDTH, Net, Readable, Router, job_of, part_job
from tests.processes import on_ranks

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]

PLANS = [
    "tp=2",
    "pp=2,microbatches=2",
    "dp=2,pp=2,tp=2",
    "dp=2,zero=3",
    "pp=2,tp=2,microbatches=4,schedule=zb-h1,recompute=full",
    "dp=2,pp=2,zero=3,recompute=selective",
]
FOUND = {
    "router": ["parts.0"],
    "own function": ["parts.0"],
    "branches": ["parts.0"],
    "numpy": ["parts.0"],
    "buffers": ["parts.0"],
    "dropout": ["parts.0.router"],
    "packed": ["parts.0"],
    "hooks": ["parts.0.linear"],
    "frozen": ["parts.0.router"],
    "attribute": ["parts.0.part"],
    "shapes of values": ["parts.0"],
    "scripted": ["parts.0.inner"],
    "normed": ["parts.0"],
    "normed over all chunks": ["parts.0"],
}


def captured(job: Job, *, training: bool = True) -> Program:
    return CapturedLoss(job).capture(first_batches(job, 2, 8), training=training)


def equal(job: Job, plan: str) -> bool:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    return report.passed


def opaque_paths(program: Program) -> Sequence[str]:
    assert set(program.opaque) == {node.args[2] for node in program.nodes if is_opaque(node)}
    return sorted(program.opaque)


@pytest.mark.covering("hooks")
@pytest.mark.parametrize("name", ["router", pytest.param("hooks", marks=pytest.mark.long)])
@pytest.mark.long
def test_the_smallest_module_that_cannot_be_read_is_found(name: str) -> None:
    assert opaque_paths(captured(part_job(name))) == FOUND[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PARTS) - {"router", "hooks"}))
def test_the_smallest_module_is_found_in_each_kind(name: str) -> None:
    assert opaque_paths(captured(part_job(name))) == FOUND[name]


@pytest.mark.covering("3")
@pytest.mark.long
@pytest.mark.parametrize("number", few(range(len(PARTS)), 5, pytest.mark.slow))
def test_parts_equal_one_device(number: int) -> None:
    name = sorted(PARTS)[number]
    assert equal(part_job(name), PLANS[number % len(PLANS)])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_equals_one_device_under_every_plan(name: str, plan: str) -> None:
    assert equal(part_job(name), plan)


@pytest.mark.long
def test_a_program_with_a_part_travels_as_bytes() -> None:
    program = captured(part_job("router"))
    other = unpack(pack(program))
    assert other.digest() == program.digest()
    assert other.opaque == program.opaque


@pytest.mark.long
@pytest.mark.slow
def test_a_module_is_opaque_because_the_job_asks() -> None:
    for asked in ("blocks.1", Readable, "Readable"):
        program = captured(job_of(lambda: Net([], "rr"), opaque=[asked]))
        assert opaque_paths(program) == (["blocks.1"] if asked == "blocks.1" else ["blocks.0", "blocks.1"])
        assert set(program.opaque.values()) == {"the job asks for it"}


def test_a_name_without_a_module_is_refused() -> None:
    with pytest.raises(JobError, match=r"names nowhere, and the model has no module of that name"):
        captured(job_of(lambda: Net([], "r"), opaque=["nowhere"]))
    with pytest.raises(JobError, match=r"must be names or types of modules"):
        job_of(lambda: Net([], "r"), opaque="router")  # a text is a sequence, too


@pytest.mark.long
def test_a_part_is_evaluated_in_evaluation_mode() -> None:
    program = captured(part_job("dropout"), training=False)
    (node,) = filter(is_opaque, program.nodes)
    assert node.num_draws == 0 and not any(call_of_node(node).modes)


def verdict(kind: str, plan: str) -> bool | None:
    """Whether a plan on rank processes equals one device; None on ranks that do not report."""
    report = verify(part_job(kind), Plan.parse(plan), devices="auto", steps=2, dtype=torch.float64)
    return report.passed if report is not None else None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "plan", "size"),
    [
        ("buffers", "pp=2,microbatches=2", 2),
        pytest.param("dropout", "pp=2,tp=2", 4, marks=pytest.mark.slow),
        pytest.param("attribute", "dp=2,pp=2", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_ranks_in_processes_equal_one_device(kind: str, plan: str, size: int) -> None:
    assert on_ranks(verdict, size, kind, plan, timeout_seconds=150.0)[0]


@pytest.mark.long
def test_a_part_whose_shapes_change_later_stops_the_step() -> None:
    program = captured(part_job("router"))
    (node,) = filter(is_opaque, program.nodes)
    call = call_of_node(node)
    model = Net([Cuts()])
    part = OpaqueModule(model.parts[0], "parts.0", call)
    state = list(model.parts[0].parameters())
    x = torch.ones(8, LENGTH, WIDTH)
    (y,) = part([x], state, "parts.0", call.text())
    assert y.shape == x.shape
    with pytest.raises(
        ChangedCallError, match=r"parts.0 \(Cuts\), an opaque part, returned tensors of shapes"
    ):
        part([-x], state, "parts.0", call.text())


class Cuts(Router):
    """Returns half of its rows if they are negative."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.sum() > 0 else y[:4]
