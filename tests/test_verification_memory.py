"""What one device needs at least, and what is said where that is not there."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch

from meshloom.core.errors import DeviceError
from meshloom.core.plan import Plan
from meshloom.machine.process_memory import collected_once
from meshloom.parameters.model import build_model
from meshloom.verify.compared import whole_batch
from meshloom.verify.reference.reference import Reference
from meshloom.verify.run import reference_bytes, verify
from tests.jobs import GPT, make_job

CPU = torch.device("cpu")
pytestmark = pytest.mark.long


def test_a_whole_batch_that_may_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    reference = Reference(make_job("mlp", "sgd"), Plan(dp=2), None, CPU, ())
    reference.run()
    name = next(iter(reference.gradients))
    reference.gradients[name] = torch.eye(3).to_sparse()  # as embeddings have
    assert whole_batch.may_fit(reference)
    monkeypatch.setattr(whole_batch, "free_bytes", lambda: 0)
    assert not whole_batch.may_fit(reference)


def test_a_model_that_one_device_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch):
    job = replace(make_job("gpt", "adamw"), model=partial(GPT, layers=5))
    model = build_model(job, CPU, None)
    num_bytes = sum(each.nbytes for each in model.parameters())
    # parameters twice, gradients, two averages
    assert reference_bytes(job, model) - sum(each.nbytes for each in model.buffers()) == 5 * num_bytes
    monkeypatch.setattr("meshloom.verify.run.free_bytes", lambda: num_bytes)
    with pytest.raises(
        DeviceError, match="Verify the same job with fewer layers, or where there is more memory"
    ):
        verify(job, Plan(dp=2), devices="simulated")


@pytest.mark.parametrize("frozen", [False, True])
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
