"""`ml.accelerate.Accelerator` under plans sees, computes and writes what accelerate's own does in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as ml
from meshloom.cli.main import main
from meshloom.core.errors import JobError, PlanError
from tests.processes import on_ranks

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from meshloom.accelerate import OpenEpochs  # noqa: E402
from tests.accelerated_loop import on_a_rank, trained, with_a_plain_accelerator  # noqa: E402

PLANS = ("dp=2", "dp=2,zero=3", "tp=2")
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}  # sums of another order

REDUCED = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshloom.accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
rows = TensorDataset(torch.randn(30, 3))
model, loader, held_out = nn.Linear(3, 1), DataLoader(rows, 6), DataLoader(rows, 10)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
for (x,) in loader:
    model.eval()
    for (y,) in held_out:
        found = model(y).detach()
        accelerator.reduce(found.mean(), "mean"), accelerator.reduce({"sum": found.sum()})
        accelerator.gather(found), accelerator.gather_for_metrics(found)
    model.train()
    loss = model(x).pow(2).mean()
    found = loss.detach()
    accelerator.reduce(found, "mean"), accelerator.reduce([len(x) * found, torch.tensor(len(x))], "sum")
    accelerator.reduce(x.max(), "max"), accelerator.reduce(found, "none")
    accelerator.gather(x), accelerator.gather_for_metrics(x), accelerator.gather_for_metrics(["any"])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Any], Path]]:
    """accelerate's own, in one process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("alone")
    yield trained(accelerate.Accelerator, str(folder)), folder
    AcceleratorState._reset_state(reset_partial_state=True)


def files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in PLANS[1:])]
)
def test_a_loop_under_a_plan_is_the_loop_of_one_process(
    plan: str, alone: tuple[list[Any], Path], tmp_path: Path
):
    expected, theirs = alone
    (seen, main), (other, follower) = on_ranks(on_a_rank, 2, plan, str(tmp_path), {}, timeout_seconds=200.0)
    assert seen == pytest.approx(expected, rel=1e-9, abs=1e-12) and other == pytest.approx(seen, rel=1e-12)
    assert (main, follower) == ([True, True, True, 3], [False, False, False, 0])
    assert files(tmp_path) == files(theirs)
    for name in ("1/model.safetensors", "2/model.safetensors", "model/model.safetensors"):
        torch.testing.assert_close(load_file(tmp_path / name), load_file(theirs / name), **CLOSE)
    for name in ("2/optimizer.bin", "2/scheduler.bin", "model.pt"):
        ours, own = (torch.load(each / name, weights_only=False) for each in (tmp_path, theirs))
        torch.testing.assert_close(ours, own, **CLOSE)
    # accelerate goes on from there without meshloom
    gone_on = trained(accelerate.Accelerator, str(tmp_path / "on"), start=1, read_from=str(tmp_path))
    straight = trained(accelerate.Accelerator, str(tmp_path / "straight"), start=1, read_from=str(theirs))
    assert gone_on == pytest.approx(straight, rel=1e-10)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2"])
def test_a_plan_goes_on_from_a_folder_of_accelerate(plan: str, alone: tuple[list[Any], Path], tmp_path: Path):
    options = {"start": 1, "read_from": str(alone[1])}
    straight = trained(accelerate.Accelerator, str(tmp_path / "alone"), **options)
    (seen, _), _ = on_ranks(on_a_rank, 2, plan, str(tmp_path / "plan"), options, timeout_seconds=200.0)
    assert seen == pytest.approx(straight, rel=1e-10)


@pytest.mark.processes
def test_accelerate_s_own_is_refused_under_several_ranks():
    for kind in ("module", "loader"):
        assert (
            "from meshloom.accelerate import Accelerator." in on_ranks(with_a_plain_accelerator, 2, kind)[1]
        )


def test_in_one_process_it_is_accelerate_s(tmp_path: Path, alone: tuple[list[Any], Path]):
    AcceleratorState._reset_state(reset_partial_state=True)
    assert trained(ml.accelerate.Accelerator, str(tmp_path)) == alone[0]
    assert files(tmp_path) == files(alone[1])
    with pytest.raises(PlanError, match=r"this script is one process. Start it with meshloom run"):
        ml.accelerate.Accelerator(plan="dp=2")


@pytest.mark.processes
@pytest.mark.slow
def test_what_is_reduced_is_verified_in_training_and_in_evaluation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text(REDUCED)
    assert main(["verify", str(tmp_path / "train.py"), "--plan", "dp=2"]) == 0
    told = (
        capfd.readouterr().out
    )  # of each step 2 gradients, 2 parameters, 3 times 2 values in evaluation, and 4
    assert "EQUAL" in told and "(3 steps of an optimizer, 42 tensors)" in told, told


def test_gathering_is_of_the_innermost_epoch_also_after_one_that_ended_early():
    reading = OpenEpochs()
    assert reading.shares
    with reading.epoch(shares=True):
        with reading.epoch(shares=False):
            assert not reading.shares
        assert reading.shares
    with reading.epoch(shares=False):
        pass
    assert not reading.shares


def test_plugins_that_divide_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    class Found:
        plan = ml.Plan(dp=2)

    monkeypatch.setattr("meshloom.accelerate.ranks", lambda plan: Found)
    with pytest.raises(
        JobError, match=r"Accelerator\(fsdp_plugin=...\) under dp=2: leave it out, the plan says"
    ):
        ml.accelerate.Accelerator(fsdp_plugin=nn.Identity())
