"""Modules that cannot be read run as they are, as one operator of the program; everything around them is read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from meshloom.core.errors import CaptureError, JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.verify.run import verify
from tests.opaque_jobs import PARTS, Net, Readable, Router, job_of, part_job

pytestmark = [pytest.mark.usefixtures("silent_export")]

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


@pytest.mark.parametrize("name", ["router", "hooks"])
def test_the_smallest_module_that_cannot_be_read_is_found(name: str) -> None:
    assert opaque_paths(captured(part_job(name))) == FOUND[name]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(PARTS) - {"router", "hooks"}))
def test_the_smallest_module_is_found_in_each_kind(name: str) -> None:
    assert opaque_paths(captured(part_job(name))) == FOUND[name]


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(PARTS)))
def test_parts_equal_one_device(number: int) -> None:
    name = sorted(PARTS)[number]
    assert equal(part_job(name), PLANS[number % len(PLANS)])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_equals_one_device_under_every_plan(name: str, plan: str) -> None:
    assert equal(part_job(name), plan)


def test_a_program_with_a_part_travels_as_bytes() -> None:
    program = captured(part_job("router"))
    other = unpack(pack(program))
    assert other.digest() == program.digest()
    assert other.opaque == program.opaque


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


def test_what_cannot_be_read_outside_of_modules_stays_refused() -> None:
    def of_values(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        error = model(batch["x"]).sub(batch["y"]).square().mean()
        return error * 2 if error.item() > 1e9 else error

    with pytest.raises(CaptureError, match="error.item"):
        captured(job_of(lambda: Net([Router()]), loss=of_values))
