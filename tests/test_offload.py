"""offload=optimizer changes where state is, and not one bit of what is computed or saved."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.optimizer.offload import disk
from meshloom.optimizer.offload.disk import StateFile
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from tests.covering import few
from tests.fitted import fitted
from tests.jobs import make_job
from tests.offload_jobs import in_file, job_with, offload_job, ran, small, tensor_files
from tests.saving_jobs import names_in

CUTS = "pp=2,microbatches=2"
CASES = [
    ("mlp", "groups", "dp=1"),
    ("mlp", "sgd", "dp=2,zero=1"),
    ("mlp", "muon", "dp=3"),
    ("mlp", "adafactor", "dp=2,zero=2,microbatches=2"),
    ("gpt", "groups", "dp=2,zero=3"),
    ("mlp", "foreach", "dp=3,exchange=server,servers=2"),
    ("mlp", "fused", "dp=2,exchange=local_sgd,local_steps=2"),
    ("mlp", "amsgrad", "dp=2,exchange=diloco,local_steps=2"),
    ("unused_twice", "adagrad", "dp=2,zero=1"),
    ("branch", "rmsprop", "dp=2,exchange=ring"),
    ("mlp", "groups", "tp=2"),
    ("mlp", "muon", "dp=2,tp=2,zero=1"),
    ("mlp", "adamw", f"{CUTS},schedule=zb-v"),
    ("mlp", "adafactor", f"dp=2,zero=3,{CUTS}"),
    ("gpt", "muon", "dp=2,compress=powersgd:2"),
    ("cnn", "sgd", "dp=2,zero=3,recompute=full"),
]


@pytest.fixture(autouse=True)
def _on_cpus(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("it is about ranks on CPUs; benchmarks/gpu has a part for GPUs")


@pytest.mark.long
@pytest.mark.parametrize(("model", "optimizer", "plan"), few(CASES, 3, pytest.mark.slow))
def test_bits_are_those_of_the_plan_without_it(
    model: str, optimizer: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    dtype = torch.float64 if plan.startswith("dp=2") else None
    without = ran(offload_job(model, optimizer), plan, dtype=dtype)
    with_it = ran(offload_job(model, optimizer), f"{plan},offload=optimizer", dtype=dtype)
    assert all(torch.equal(with_it[name], each) for name, each in without.items())


def test_what_cannot_update_a_few_parameters_is_stepped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that counts steps must count as often as without offloading; it is said what that costs."""
    small(monkeypatch)
    calls: list[int] = []

    def hooked(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=0.1, momentum=0.9)
        made.register_step_post_hook(lambda *_: calls.append(1))
        return made

    job = job_with("mlp", hooked, steps=2)
    notes: list[str] = []
    listener = Listener()
    monkeypatch.setattr(listener, "note", notes.append)
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated", listener=listener) as trainer:
        trainer.fit()
        assert in_file(trainer.replicas[0].updater) == 6
    assert len(calls) == 2
    assert any("SGD cannot update a few parameters at a time" in each for each in notes)
    assert any("Optimizer state is in an unlinked file in" in each for each in notes)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "tp=2", "dp=2,exchange=diloco,local_steps=2"])
@pytest.mark.slow
def test_checkpoints_have_the_same_bytes_and_each_resumes_the_other(
    plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    job = offload_job("mlp", "groups", steps=2)
    longer = offload_job("mlp", "groups", steps=4)
    offloading_plan = f"{plan},offload=optimizer"
    ran(job, plan, out=tmp_path / "without")
    ran(job, offloading_plan, out=tmp_path / "with")
    without, with_it = tensor_files(tmp_path / "without"), tensor_files(tmp_path / "with")
    assert without == with_it and len(without) > 1
    expected = ran(longer, plan, resume=tmp_path / "without")
    for before, after in (("without", offloading_plan), ("with", plan), ("with", offloading_plan)):
        ours = ran(longer, after, resume=tmp_path / before)
        assert all(torch.equal(ours[name], each) for name, each in expected.items())


def test_checkpoints_are_written_in_the_foreground_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    notes: list[str] = []
    job = offload_job("mlp", "sgd", steps=2, checkpoint="background", checkpoint_every=1)
    fitted(job, "dp=2,zero=1,offload=optimizer", out=tmp_path / "with", listener=Listener(note=notes.append))
    assert next(note for note in notes if "in the foreground" in note).startswith(
        "Checkpoints are written in the foreground: offload=optimizer keeps the optimizer's state in a file"
    )
    ran(offload_job("mlp", "sgd", steps=2), "dp=2,zero=1", out=tmp_path / "without")
    assert tensor_files(tmp_path / "with") == tensor_files(tmp_path / "without")


@pytest.mark.slow
def test_a_process_holds_the_state_of_one_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Resident pages of the file, as the kernel counts them, while a window is updated and after a save."""
    width = 256  # a matrix is 64 pages
    monkeypatch.setattr(disk, "WINDOW_BYTES", 4 * width * width)
    seen: list[int] = []

    step: Any = torch.optim.AdamW.step

    def watched(self: Optimizer, closure: object = None) -> None:
        step(self)
        seen.append(resident(tmp_path))

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    job = replace(
        job_with("mlp", lambda named: torch.optim.AdamW(named, lr=0.01), steps=3),
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6))),
        loss=lambda model, batch: model(batch["x"].repeat(1, 37)[:, :width]).square().mean(),
    )
    with Trainer(job, "dp=1,offload=optimizer", devices="simulated", out=tmp_path) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            assert resident(tmp_path) == 0
        trainer.save()
        assert resident(tmp_path) == 0
        assert len(seen) >= 18 and 0 < max(seen[-6:]) <= 2 * 4 * width * width
        assert [name for name in names_in(tmp_path) if not name.startswith("step-")] == []


def resident(directory: Path) -> int:
    """Bytes of unlinked files of `directory` that are mapped and resident in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = str(directory) in line and line.endswith("(deleted)")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_tensors_keep_identity_values_and_strides(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    tensors = [
        torch.randn(33, 7).t(),
        torch.arange(5, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([True, False]),
    ]
    values = [each.clone() for each in tensors]
    for each in tensors:
        file.place(each)
    file.give_back(tensors)
    file.ask_for(tensors)
    assert all(file.holds(each) for each in tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, values, strict=True))
    assert tensors[0].stride() == (1, 7)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_one_sentence_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Usage:
        free = 10000

    monkeypatch.setattr("meshloom.optimizer.offload.disk.shutil.disk_usage", lambda _: Usage)
    small(monkeypatch)
    with pytest.raises(
        PlanError,
        match=r"offload=optimizer needs 24 KiB of disk for the optimizer's state of this rank, and .* has 9.77 KiB for it \(No space",
    ):
        Trainer(make_job("mlp", "sgd"), "dp=2,offload=optimizer", devices="simulated", out=tmp_path)


def test_a_directory_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("meshloom.machine.file_system.file_system_of", lambda _: "tmpfs")
    monkeypatch.setattr("meshloom.optimizer.offload.disk.file_system_of", lambda _: "tmpfs")
    with pytest.raises(PlanError, match=r"is on tmpfs, which is memory. Give --out"):
        Trainer(make_job("mlp", "sgd"), "dp=1,offload=optimizer", devices="simulated", out=tmp_path)


def test_the_file_is_on_a_disk_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the run's directory; else with temporary files; else in /var/tmp."""
    kinds: dict[Path, str] = {}
    monkeypatch.setattr("meshloom.machine.file_system.file_system_of", lambda path: kinds.get(path, "ext4"))
    temporary = Path(tempfile.gettempdir())
    assert disk.directory_for(tmp_path) == tmp_path
    assert disk.directory_for(None) == disk.directory_for(tmp_path / "missing") == temporary
    for remote in ("nfs4", "lustre", "fuse.sshfs"):
        kinds[tmp_path] = remote
        assert disk.directory_for(tmp_path) == temporary
    kinds[temporary] = "tmpfs"
    assert disk.directory_for(None) == Path("/var/tmp")
    kinds[Path("/var/tmp")] = "tmpfs"
    assert disk.directory_for(None) == temporary


def test_state_that_is_smaller_than_a_page_stays_in_memory_and_that_is_said() -> None:
    with Trainer(make_job("mlp", "adamw"), "dp=1,offload=optimizer", devices="simulated") as trainer:
        (note,) = trainer.replicas[0].updater.notes()
        assert note.startswith("Optimizer state stays in memory: none of its tensors has 4 KiB on this rank")


def test_it_is_written_in_one_way() -> None:
    assert (
        str(Plan.parse("dp=2,exchange=async,staleness=0,offload=optimizer"))
        == "dp=2,offload=optimizer,exchange=server"
    )
    assert Plan.from_json(Plan(offload="optimizer").to_json()) == Plan(offload="optimizer")
