"""What a verification is predicted to need beside its ranks, and what is said where that is not there."""

from __future__ import annotations

import gc

import pytest
import torch

from meshloom.core.errors import DeviceError
from meshloom.core.plan import Plan
from meshloom.machine.process_memory import collected_once
from meshloom.parameters.model import build_model
from meshloom.planner.readings import Readings
from meshloom.verify import reference_size
from meshloom.verify.compared import whole_batch
from meshloom.verify.fewer_blocks import without_values
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference_size import check_processes_fit, verification_bytes
from tests.jobs import make_job
from tests.test_fewer_blocks import CPU, gpt_job

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def readings() -> Readings:
    return Readings(gpt_job())


@pytest.mark.slow
def test_ranks_and_one_device_take_turns(readings: Readings):
    needed, quick = (verification_bytes(readings, Plan(dp=2), 2, quick=each) for each in (False, True))
    trained = sum(each.nbytes for each in build_model(readings.job, CPU, None).parameters())
    # each rank: parameters, gradients, two averages; one device: parameters twice
    assert needed.ranks > 2 * 4 * trained and needed.one_device >= 5 * trained
    assert max(needed.ranks, needed.one_device) < needed.total < needed.ranks + needed.one_device
    # the steps alone: ranks have one copy of the parameters
    assert quick.total < needed.total - trained


@pytest.mark.slow
def test_float64_takes_twice_as_much(readings: Readings):
    once, twice = (verification_bytes(readings, Plan(dp=2), 2, wider, quick=True) for wider in (1.0, 2.0))
    assert (twice.ranks, twice.one_device) == (2 * once.ranks, 2 * once.one_device)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_ways_out(readings: Readings, monkeypatch: pytest.MonkeyPatch):
    plan, model = Plan(dp=2), without_values(readings.job)
    whole, quick = (verification_bytes(readings, plan, 2, quick=each).total for each in (False, True))
    for free, said in (
        (whole - 1, r"predicted to need .* --quick, the steps alone, .* --blocks 2 verifies .* --overcommit"),
        (quick - 1, r"2 ranks up to .* are free\. --blocks 2 verifies"),
    ):
        monkeypatch.setattr(reference_size, "free_bytes", lambda free=free: free)
        with pytest.raises(DeviceError, match=said):
            check_processes_fit(readings, model, plan, None, num_here=2, quick=False)
    monkeypatch.setattr(reference_size, "free_bytes", lambda: whole)
    check_processes_fit(readings, model, plan, None, num_here=2, quick=False)
    with pytest.raises(DeviceError, match="predicted to need"):
        check_processes_fit(readings, model, plan, torch.float64, num_here=2, quick=False)


def test_a_small_model_is_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference_size, "verification_bytes", None)
    job = make_job("mlp", "sgd")
    check_processes_fit(Readings(job), without_values(job), Plan(dp=2), None, num_here=2, quick=False)


def test_a_whole_batch_that_may_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    reference = Reference(make_job("mlp", "sgd"), Plan(dp=2), None, CPU, ())
    reference.run()
    name = next(iter(reference.gradients))
    reference.gradients[name] = torch.eye(3).to_sparse()  # as embeddings have
    assert whole_batch.may_fit(reference)
    monkeypatch.setattr(whole_batch, "free_bytes", lambda: 0)
    assert not whole_batch.may_fit(reference)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.long
def test_older_objects_are_looked_through_once_and_a_callers_freeze_stays(frozen: bool):
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        with collected_once():
            assert gc.get_freeze_count() > 1000
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as all tests find it
