"""`ml.transformers`: a Trainer's losses, metrics, events and files under a plan are those of the library's own Trainer in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import meshloom as ml
from meshloom.core.errors import JobError
from meshloom.loops.call_microbatches import microbatches_of
from meshloom.loops.ranks import leave_ranks
from meshloom.loops.taken_shares import TakenShare, bind, counted_as
from tests.processes import on_ranks
from tests.trainer_cases import CASES, all_trained, gpt2

# what is computed in float64, and all else
EXACT, ROUNDED = {"gpt2", "stream"}, {"bf16": 2e-2}
PLANS = {
    "dp=2": [*CASES],
    "dp=2,zero=3": ["gpt2", "smoothed", "t5", "bf16"],
    "tp=2": ["gpt2", "t5", "bf16"],
    "pp=2": ["gpt2", "t5"],
    "pp=2,microbatches=2": ["inner"],
}
# private, or called by what is private: a version may drop them
OVERRIDDEN = {
    "create_accelerator_and_postprocess", "get_train_dataloader", "_wrap_model", "_run_epoch", "get_batch_samples", "training_step", "_track_num_input_tokens",
    "store_flos", "evaluation_loop", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_checkpoint",
}  # fmt: skip


def test_the_library_has_every_method_that_is_overridden():
    new = {"make_parallel", "loss_count", "_count_of", "_share_of"}
    own = {name for name, each in vars(ml.transformers.Parallel).items() if callable(each)} - new
    assert own == OVERRIDDEN
    missing = sorted(name for name in OVERRIDDEN if not hasattr(transformers.Trainer, name))
    assert not missing, f"transformers {transformers.__version__} has no Trainer.{', '.join(missing)}"
    assert hasattr(transformers.trainer_callback.CallbackHandler, "call_event")


@pytest.fixture(autouse=True)
def _leaves_ranks() -> Iterator[None]:
    yield
    leave_ranks(well=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By the library's own Trainer."""
    return all_trained("", [*CASES], tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_trains_what_the_library_does_in_one_process(plan: str, alone: dict[str, Any], tmp_path: Path):
    first, other = on_ranks(all_trained, 2, plan, PLANS[plan], tmp_path, timeout_seconds=300)
    for name in PLANS[plan]:
        assert (first[name].pop("first"), other[name].pop("first")) == (True, False)
        expected, close = alone[name], ROUNDED.get(name, 1e-10 if name in EXACT else 1e-5)
        for key in ("events", "files", "tokens"):
            assert first[name][key] == expected[key], (name, key)
        assert first[name]["weights"] == pytest.approx(expected["weights"], rel=close), name
        for one, two in zip(first[name]["logged"], expected["logged"], strict=True):
            assert one == pytest.approx(two, rel=close), name
        assert other[name]["logged"] == first[name]["logged"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3"])
def test_what_a_plan_has_saved_is_resumed_by_the_library_and_by_another_plan(
    plan: str, alone: dict[str, Any], tmp_path: Path
):
    on_ranks(all_trained, 2, plan, ["gpt2"], tmp_path / "saved", timeout_seconds=300)
    checkpoint = str(tmp_path / "saved" / "gpt2" / "checkpoint-2")
    found = all_trained("", ["gpt2"], tmp_path / "library", checkpoint)
    other = on_ranks(all_trained, 2, "dp=2", ["gpt2"], tmp_path / "plan", checkpoint, timeout_seconds=300)[0]
    for each in (found, other):
        for one, two in zip(each["gpt2"]["logged"], alone["gpt2"]["logged"], strict=True):
            one.pop("train_loss", None)  # which is of the steps since
            assert one == pytest.approx({name: two[name] for name in one}, rel=1e-10)
        assert each["gpt2"]["weights"] == pytest.approx(alone["gpt2"]["weights"], rel=1e-10)


@pytest.mark.processes
@pytest.mark.slow
def test_a_script_around_a_trainer_is_equal_to_itself(tmp_path: Path):
    script = Path(__file__).parents[1] / "examples/20_transformers_trainer.py"
    command = [sys.executable, "-m", "meshloom", "verify", str(script), "--plan", "dp=2,zero=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "EQUAL" in done.stdout, done.stdout + done.stderr


def test_calls_are_of_the_share_that_counts_what_a_loss_is_a_mean_over():
    x, share = torch.ones(3), TakenShare((2, 4), 1)
    with counted_as(share):
        assert bind(x) is share and share.weight == 4 / 3
    assert bind(x) is not share


def test_a_number_of_all_rows_is_cut_by_rows():
    batch = {"x": torch.ones(5, 2), "items": torch.tensor(10.0)}
    parts, _ = microbatches_of(batch, 2, {"items": "part"})
    assert [float(each.batch["items"]) for each in parts] == [6, 4]


def _mine(tmp_path: Path, model: nn.Module | None = None, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings
    )
    return ml.transformers.Trainer(model or gpt2(), arguments)


@pytest.fixture
def under_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, as far as a Trainer asks while it is made."""
    found = SimpleNamespace(plan=ml.Plan(dp=2), own=SimpleNamespace(rank=0))
    monkeypatch.setattr("meshloom.transformers.ranks", lambda: found)


@pytest.mark.usefixtures("under_a_plan")
def test_settings_that_divide_by_themselves_are_refused_by_name(tmp_path: Path):
    with pytest.raises(JobError, match="auto_find_batch_size=True"):
        _mine(tmp_path, auto_find_batch_size=True)


@pytest.mark.usefixtures("under_a_plan")
@pytest.mark.parametrize(
    "loaded",
    [{"_is_distributed_loading_by_transformers": True}, {"hf_device_map": {"transformer": 0, "lm_head": 1}}],
)
def test_a_model_that_was_loaded_in_parts_is_refused_by_name(loaded: dict[str, Any], tmp_path: Path):
    model = gpt2()
    for name, value in loaded.items():
        setattr(model, name, value)
    with pytest.raises(JobError, match="GPT2LMHeadModel was loaded in parts"):
        _mine(tmp_path, model)


def test_several_devices_in_sight_are_no_data_parallel(tmp_path: Path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    arguments._n_gpu = 4
    trainer = ml.transformers.Trainer(gpt2(), arguments)
    assert (arguments.n_gpu, arguments.train_batch_size) == (1, 8)
    assert not isinstance(trainer._wrap_model(trainer.model, training=False), nn.DataParallel)


def test_a_plan_in_one_process_says_how_its_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHLOOM_PLAN", "dp=2")
    with pytest.raises(ml.MeshloomError, match="this script is one process. Start it with meshloom run"):
        _mine(tmp_path)
