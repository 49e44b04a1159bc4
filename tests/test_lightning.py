"""`ml.lightning.Strategy`: what Lightning's own Trainer gives in one process, under every plan, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

import meshloom as ml
from meshloom.core.errors import JobError, MeshloomError, PlanError
from tests.covering import slow
from tests.lightning_cases import CASES, Classifier, all_cases, begin, loaders, resumed, saved, trainer
from tests.processes import on_ranks

pytestmark = [pytest.mark.filterwarnings("ignore")]
PLANS = ("dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2")
DIVIDED = (
    "parameters_beside_a_network_of_batches_of_one_size",
    "two_optimizers_by_hand",
)  # each shape is captured
EXAMPLE = Path(__file__).parents[1] / "examples" / "21_lightning.py"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """By the library itself."""
    return on_ranks(all_cases, 1, timeout_seconds=200.0)[0]


def check(ours: Any, theirs: Any, at: str) -> None:
    """Numbers to 1e-9 (float64, sums in another order), all else exactly."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), at
        for name, each in theirs.items():
            check(ours[name], each, f"{at}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), at
        for number, (mine, each) in enumerate(zip(ours, theirs, strict=True)):
            check(mine, each, f"{at}.{number}")
    else:
        try:
            assert float(ours) == pytest.approx(float(theirs), rel=1e-9, abs=1e-12), at
        except ValueError:
            assert ours == theirs, at


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in PLANS[1:])]
)
def test_a_plan_gives_what_the_library_gives_in_one_process(plan: str, alone: dict[str, Any]):
    names = DIVIDED if plan in PLANS[2:] else [*CASES]
    first, second = on_ranks(all_cases, 2, plan, names, timeout_seconds=300.0)
    for name in names:
        theirs = alone[name]
        check(first[name], theirs, name)
        check(second[name], theirs[: len(second[name])], name)


@pytest.mark.processes
@pytest.mark.parametrize("plan", [slow("tp=2"), "dp=2,zero=3"])
def test_a_checkpoint_of_a_plan_is_read_by_the_library_alone_and_under_another_plan(
    plan: str, tmp_path: Path
):
    ours, theirs = str(tmp_path / "ours.ckpt"), str(tmp_path / "theirs.ckpt")
    assert max(on_ranks(saved, 2, plan, ours, timeout_seconds=200.0)) < 0.6
    on_ranks(saved, 1, None, theirs, timeout_seconds=200.0)
    mine, expected, straight = (
        on_ranks(resumed, 1, each, timeout_seconds=200.0)[0] for each in (ours, theirs, None)
    )
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)
    # alone, Lightning begins the data of the epoch again; under a plan it goes on
    assert not torch.allclose(torch.tensor(expected[0]), torch.tensor(straight[0]), atol=1e-6)
    under_another = on_ranks(resumed, 2, ours, "dp=2", timeout_seconds=200.0)[0]
    torch.testing.assert_close(under_another, straight, rtol=0, atol=1e-10)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_the_example_is_verified(plan: str, tmp_path: Path):
    command = [sys.executable, "-m", "meshloom", "verify", str(EXAMPLE), "--plan", plan]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "EQUAL: the script computes under" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"devices": 2}, PlanError, r"Trainer\(devices=2, num_nodes=1\) has meshloom's Strategy, whose plan says on how many devices"),
        ({"sync_batchnorm": True}, PlanError, "batch norm normalizes by the share of a replica"),
        ({"val_check_interval": "00:00:01:00"}, PlanError, "the clocks of ranks differ"),
        ({}, PlanError, "The plan dp=2,tp=2 has 4 ranks, and this script is one process. Start it with meshloom run SCRIPT.py --plan dp=2,tp=2"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_plan_is_a_sentence(
    settings: dict[str, Any], error: type[MeshloomError], told: str
):
    with pytest.raises(error, match=told):
        trainer("dp=2,tp=2", **settings).fit(Classifier(), *loaders())


def test_one_process_and_no_plan_is_the_library(tmp_path: Path):
    module, plain = Classifier(), Classifier()
    given: Any = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        "accelerator": "cpu",
    }
    lightning.Trainer(strategy=ml.lightning.Strategy(), **given).fit(module, loaders(shuffle=False)[0])
    lightning.Trainer(**given).fit(plain, loaders(shuffle=False)[0])
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.processes
def test_a_callback_that_decides_on_each_rank_is_refused_by_name():
    for told in on_ranks(_found_by_trial, 2):
        assert told.startswith("BatchSizeFinder decides on each rank by itself. Run it in one process")


def _found_by_trial() -> str:
    begin()
    with pytest.raises(JobError) as caught:
        trainer("dp=2", BatchSizeFinder()).fit(Classifier(), *loaders())
    return str(caught.value)
