"""Statements of a loss that only look at values are read; those that decide what runs are not."""

from __future__ import annotations

import pytest

from meshloom.core.job import Job
from meshloom.data.samples import first_batches
from meshloom.program.store.captured_loss import CapturedLoss
from tests.loss_jobs import job_of
from tests.statement_losses import (
    asserts,
    decides,
    ends_with_a_check,
    has_another_way,
    prints,
    raises,
    variances,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def captured(job: Job) -> None:
    program = CapturedLoss(job).capture(first_batches(job, 2, 6))
    assert not program.opaque


@pytest.mark.parametrize("loss", [raises, prints, asserts, variances, ends_with_a_check])
@pytest.mark.long
def test_a_statement_that_only_looks_is_passed_by(loss: object) -> None:
    captured(job_of(loss))


@pytest.mark.parametrize("loss", [decides, has_another_way])
@pytest.mark.long
def test_a_statement_that_decides_is_not(loss: object) -> None:
    program = CapturedLoss(job_of(loss)).capture(first_batches(job_of(loss), 2, 6))
    ((part, why),) = program.opaque.items()
    assert part == "the loss function" and "depends on the values in the batch" in why
