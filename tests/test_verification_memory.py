"""What a verification is predicted to need beside its ranks, and what is said where that is not there."""

from __future__ import annotations

import gc

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.machine.process_memory import collected_once
from meshloom.verify.compared import whole_batch
from meshloom.verify.reference.reference import Reference
from tests.jobs import make_job
from tests.test_fewer_blocks import CPU

pytestmark = pytest.mark.long


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
