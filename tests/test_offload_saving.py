"""Saves in the background beside offload=optimizer: the state is read from its file and never copied, while updates go
on elsewhere in it.

A save that is under way is held where a test wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing import save_room
from meshloom.core.job import Job
from meshloom.optimizer.offload import disk
from meshloom.optimizer.offload.disk import StateFile
from meshloom.train.trainer import Trainer
from tests.covering import few
from tests.offload_jobs import Counting, job_with, offload_job, ran, small
from tests.test_background_saving import Held, checkpoints_in, train

SAVING: dict[str, Any] = {"checkpoint": "background", "keep_checkpoints": 9}
CASES = [
    ("mlp", "groups", "dp=2,zero=1"),
    ("gpt", "adamw", "dp=2,tp=2"),
    ("mlp", "counting", "dp=1"),
    ("mlp", "late", "dp=3,zero=2"),
    ("mlp", "frozen", "dp=2,zero=3"),
    ("unused_twice", "adagrad", "dp=2"),
    ("branch", "rmsprop", "dp=2,zero=1"),
    ("mlp", "muon", "tp=2"),
    ("mlp", "adafactor", "pp=2,microbatches=2"),
    ("mlp", "amsgrad", "dp=2,exchange=diloco,local_steps=2"),
    ("mlp", "fused", "dp=2,exchange=local_sgd,local_steps=2"),
    ("mlp", "foreach", "dp=2,exchange=server"),
    ("mlp", "hooked", "dp=2,zero=1"),
]


@pytest.fixture(autouse=True)
def _on_cpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("it is about ranks on CPUs")
    small(monkeypatch)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.go.set()


class Late(Optimizer):
    """Momentum from the first step on; from the fourth, in the middle of a save, a second average and a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["first"], state["seen"] = torch.zeros_like(each), torch.zeros(())
                state["seen"] += 1
                if each.grad is None:
                    continue
                state["first"].lerp_(each.grad, 0.5)
                if state["seen"] > 3:
                    second = state.setdefault("second", torch.ones_like(each))
                    second.lerp_(each.grad.square(), 0.1)
                each.sub_(group["lr"] * state["first"] / state.get("second", torch.ones(())).sqrt())


def hooked(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """It is stepped once for all parameters."""
    made = torch.optim.AdamW(named, lr=0.01)
    made.register_step_post_hook(lambda *_: None)
    return made


def frozen(model: nn.Module) -> nn.Module:
    next(iter(model.parameters())).requires_grad_(False)
    return model


def job_of(model: str, optimizer: str, **settings: Any) -> Job:
    settings = {"steps": 7, "checkpoint_every": 3, **SAVING, **settings}
    builds = {"counting": Counting, "late": lambda named: Late([each for _, each in named]), "hooked": hooked}
    if optimizer in builds:
        return job_with(model, builds[optimizer], **settings)
    job = offload_job(model, "groups" if optimizer == "frozen" else optimizer, **settings)
    return replace(job, model=lambda: frozen(job.model())) if optimizer == "frozen" else job


def let_go_after(held: Held, step: int) -> Callable[[int], None]:
    return lambda done: held.go.set() if done == step else None


@pytest.mark.long
@pytest.mark.covering("mlp-groups", "mlp-counting")
@pytest.mark.parametrize(("model", "optimizer", "plan"), few(CASES, 5, pytest.mark.slow))
def test_files_and_training_are_those_of_a_foreground_save_in_memory(
    model: str, optimizer: str, plan: str, held: Held, tmp_path: Path
) -> None:
    """The save after step 3 is written after two more updates, the next one in its turn; then a run resumes it."""
    steps = 6 if "local" in plan else 7
    train(job_of(model, optimizer, steps=steps, checkpoint="foreground"), plan, tmp_path / "plain")
    job = job_of(model, optimizer, steps=steps)
    train(job, f"{plan},offload=optimizer", tmp_path / "with", let_go_after(held, 5))
    plans = {path.name: Checkpoint.open(path).plan_text for path in (tmp_path / "with").glob("step-*")}
    assert all("offload=optimizer" in each for each in plans.values()) and len(plans) == (
        2 if steps == 6 else 3
    )
    assert_equal_tensors(tmp_path / "with", tmp_path / "plain")
    resumed = ran(job, f"{plan},offload=optimizer", resume=tmp_path / "with" / "step-00000003")
    expected = ran(replace(job, checkpoint="foreground"), plan, resume=tmp_path / "plain" / "step-00000003")
    assert all(torch.equal(resumed[name], each) for name, each in expected.items())


def assert_equal_tensors(one: Path, other: Path) -> None:
    """The same checkpoints, byte by byte but for the plan's name."""
    assert checkpoints_in(one) == checkpoints_in(other) != []
    for name in checkpoints_in(one):
        for path in (one / name).glob("*.safetensors"):
            assert path.read_bytes() == (other / name / path.name).read_bytes(), path


@pytest.mark.long
def test_only_what_is_in_memory_is_copied_and_that_is_said(
    held: Held, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what updates write meanwhile is moved once: the file is twice as large as the state."""
    monkeypatch.setattr(disk, "SMALLEST", 200)  # biases stay in memory
    files: list[StateFile] = []
    monkeypatch.setattr(disk, "StateFile", lambda path: files.append(StateFile(path)) or files[-1])
    moved: list[int] = []
    move = StateFile.move
    monkeypatch.setattr(StateFile, "move", lambda self, each: moved.append(each.nbytes) or move(self, each))
    job = job_of("mlp", "adamw", steps=6)
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated", out=tmp_path) as trainer:
        parameters = [each for _, each in trainer.replicas[0].named]
    large = [each for each in parameters if each.nbytes >= 200]
    files.clear()
    notes = train(job, "dp=1,offload=optimizer", tmp_path, let_go_after(held, 5), overwrite=True)
    (file,) = files
    pages = sum(2 * 4096 * -(-each.nbytes // 4096) for each in large)
    assert file.num_bytes == 2 * pages
    assert sum(moved) == 2 * sum(each.nbytes for each in large)  # two averages
    copied = sum(3 * each.nbytes + 4 for each in parameters) - 2 * sum(each.nbytes for each in large)
    said = next(each for each in notes if each.startswith("Checkpoints are written in the background"))
    assert f"from a copy of what is not offloaded in host memory: {copied / 1024:.3g} KiB (" in said
    assert (
        f"updates write to {pages // 1024} KiB ({pages // 1024} KiB of it on rank 0) more of the disk" in said
    )


@pytest.mark.long
def test_a_full_disk_means_a_save_in_the_foreground(
    held: Held, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the checkpoint takes of the same disk is counted, and both ranks' state."""
    held.go.set()
    real = save_room._disk_of
    job = job_of("mlp", "sgd", steps=4)
    train(job, "dp=2,zero=1", tmp_path / "without")
    for free, fits in ((20_000, False), (2**40, True)):
        monkeypatch.setattr(save_room, "_disk_of", lambda path, free=free: [real(path)[0], free, str(path)])
        out = tmp_path / str(free)
        notes = train(job, "dp=2,zero=1,offload=optimizer", out)
        refused = [each for each in notes if "is saved in the foreground" in each]
        assert bool(refused) != fits
        if refused:
            assert refused[0].startswith(
                "Step 3 is saved in the foreground: meanwhile, updates would write the offloaded optimizer state to "
            )
            assert (
                f"more of the disk of {out}, and 19.5 KiB are free there, of which the checkpoint takes"
                in refused[0]
            )
        assert_equal_tensors(out, tmp_path / "without")
