"""zero_within: slices within groups of replicas, equal between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshloom.core.errors import TrainingError
from meshloom.core.plan import Plan
from meshloom.exchange.zero_three import ZeroThree
from meshloom.train.trainer import Trainer
from tests.processes import on_ranks
from tests.test_zero_three import EVALUATE, assert_goes_on_and_back, on_gloo, runs, trained
from tests.test_zero_three_programs import BLOCKS, holds
from tests.zero_three_jobs import unit_job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("shuffled", "dp=4,zero=3,zero_within=2,microbatches=2"),
        ("tied", f"dp=4,pp=2,{BLOCKS},zero=3,zero_within=2,microbatches=2"),
    ],
)
def test_groups_gather_independently(kind: str, plan: str) -> None:
    holds(kind, plan)


@pytest.mark.slow
def test_bytes_are_as_predicted_and_a_rank_keeps_a_part_of_its_group() -> None:
    plan = "dp=4,zero=3,zero_within=2,microbatches=2"
    summary, ours = trained(plan, "tied", steps=2, evaluate=EVALUATE)
    one, theirs = trained("dp=1", "tied", steps=2, evaluate=EVALUATE)
    assert summary.predicted == summary.counted
    assert summary.evaluation == pytest.approx(one.evaluation, rel=1e-12)
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-10, atol=1e-12) for name in theirs)
    with Trainer(unit_job("tied"), plan, devices="simulated") as trainer:
        total = sum(each.numel() for each in theirs.values())
        for replica in trainer.replicas:
            owned = sum(each.stop - each.start for each in replica.exchange.ownership.owned)
            assert abs(owned - total / 2) <= len(theirs)


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_plan_and_back(tmp_path: Path) -> None:
    assert_goes_on_and_back("tied", "muon", "dp=4,zero=3,zero_within=2", "dp=3,zero=3", tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_that_share_nothing_compute_what_simulated_ranks_do() -> None:
    plans, kinds = ["dp=4,zero=3,zero_within=2,microbatches=2"] * 2, ["shuffled", "tied"]
    found = on_ranks(on_gloo, 4, plans, kinds, timeout_seconds=120.0)
    for ours, theirs in zip(found[0], runs(plans, kinds, devices="simulated"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)  # float64; sums over ranks have no order


@pytest.mark.long
def test_slices_that_drift_apart_are_found() -> None:
    with Trainer(unit_job("blocks", steps=1), "dp=4,zero=3,zero_within=2", devices="simulated") as trainer:
        exchange = trainer.replicas[3].exchange
        assert isinstance(exchange, ZeroThree)
        exchange.each_slice()[0].data()[0] += 1e-3
        with pytest.raises(TrainingError, match="differs between replicas dp=1 and dp=3"):
            trainer.fit()


def test_it_changes_no_mesh() -> None:
    assert Plan.parse("dp=4,zero=3,zero_within=4").mesh == Plan.parse("dp=4,zero=3").mesh
