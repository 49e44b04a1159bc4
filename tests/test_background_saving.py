"""Checkpoints that are written while training goes on are those that a run that stands still writes.

A save that is under way is held where a test wants it, so that nothing here depends on how fast a disk is.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing import parallel
from meshloom.checkpoint.writing.host_copy import CopyMemory, HostCopy
from meshloom.checkpoint.writing.parallel import DividedState
from meshloom.core.errors import CheckpointError, JobError
from meshloom.core.job import Job
from meshloom.core.units import format_bytes
from meshloom.machine.process_memory import regained_bytes
from meshloom.telemetry.progress import QUIET, Listener, Progress
from meshloom.train import run_checkpoints
from meshloom.train.contract import Batch
from meshloom.train.trainer import Trainer
from tests.covering import few
from tests.fitted import fitted
from tests.jobs import make_job
from tests.processes import on_ranks
from tests.saving_jobs import names_in

PLANS = [
    "dp=1", "dp=3", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3", "tp=2", "pp=2", "dp=2,tp=2", "dp=2,pp=2,tp=2",
    "dp=2,pp=2,zero=2", "dp=2,exchange=local_sgd,local_steps=2", "dp=2,exchange=diloco,local_steps=2", "dp=2,exchange=server",
]  # fmt: skip


HELD_SECONDS = 240.0  # threads of low priority, where many others compute


class Held:
    """Parts that threads write once they are let go. failing: the number of the part writing that fails, of a disk
    that is full."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.there = threading.Event()  # a thread is about to write
        self.failing: int | None = None
        self._count = 0
        real = parallel.write_parts

        def write(*arguments: Any) -> None:
            if threading.current_thread().name.startswith("saving"):
                self.there.set()
                assert self.go.wait(HELD_SECONDS)
                self._count += 1
                if self._count == self.failing:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(*arguments)

        patch.setattr(parallel, "write_parts", write)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.go.set()


def job_of(model: str = "mlp", optimizer: str = "adamw", **more: Any) -> Job:
    settings = {"steps": 5, "checkpoint_every": 2, "checkpoint": "background", "keep_checkpoints": 9, **more}
    return make_job(model, optimizer, **settings)


def train(
    job: Job, plan: str, out: Path, step: Callable[[int], None] | None = None, **more: Any
) -> list[str]:
    """Train with simulated ranks; the notes. step: called after each."""
    notes: list[str] = []
    listener = Listener(
        started=lambda text: None,
        note=notes.append,
        step=lambda progress: step(progress.step) if step else None,
        saved=lambda step, path: notes.append(f"saved {step}"),
    )
    fitted(job, plan, out=out, listener=listener, **more)
    return notes


def let_go_after_step_3(held: Held) -> Callable[[int], None]:
    """What is saved after step 2 is written after the next step."""
    return lambda step: held.go.set() if step == 3 else None


def checkpoints_in(directory: Path) -> list[str]:
    return [name for name in names_in(directory) if "step-" in name]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def assert_equal(one: Path, other: Path) -> None:
    """The same checkpoints, byte by byte, meta.json included."""
    assert checkpoints_in(one) == checkpoints_in(other)
    for name in checkpoints_in(one):
        assert files_of(one / name) == files_of(other / name), name


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["mlp", "gpt", "cnn"])
@pytest.mark.slow
def test_the_files_are_those_of_a_foreground_save(plan: str, model: str, held: Held, tmp_path: Path) -> None:
    """Of the step that was saved, although a step and its update come before anything is written."""
    train(job_of(model, checkpoint="foreground"), plan, tmp_path / "foreground")

    notes = train(job_of(model), plan, tmp_path / "background", let_go_after_step_3(held))
    assert_equal(tmp_path / "background", tmp_path / "foreground")
    assert [each for each in notes if each.startswith("saved")] == ["saved 2", "saved 4", "saved 5"]


@pytest.mark.parametrize(
    ("plan", "share"),
    [("dp=2", True), ("dp=1", False), *((plan, True) for plan in PLANS[1:]), ("tp=2", False)],
)
@pytest.mark.slow
def test_an_update_waits_for_what_is_not_copied(
    plan: str, share: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread copies nothing before the next step is over: without the wait the files are those of torn state."""
    train(job_of(checkpoint="foreground"), plan, tmp_path / "foreground", share=share)
    go = hold_copies(monkeypatch)
    train(job_of(), plan, tmp_path / "waiting", lambda step: go.set() if step == 3 else None, share=share)
    assert_equal(tmp_path / "waiting", tmp_path / "foreground")

    monkeypatch.setattr(HostCopy, "before_update", lambda _: None)
    go.clear()
    train(job_of(), plan, tmp_path / "torn", lambda step: go.set() if step == 3 else None, share=share)
    saved, expected = (files_of(tmp_path / each / "step-00000002") for each in ("torn", "foreground"))
    assert saved["state-00000-of-00001.safetensors"] != expected["state-00000-of-00001.safetensors"]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.long
def test_a_loop_of_ones_own_may_change_what_was_saved(
    share: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between two steps. With one copy it says that it does not: no checkpoint is made of what it has changed."""
    go = hold_copies(monkeypatch)
    trainer = Trainer(job_of(), "dp=2", devices="simulated", out=tmp_path, listener=QUIET, share=share)
    batches = cast(Generator[Batch], trainer.batches())
    trainer.step(next(batches))
    trainer.save()
    trainer.step(next(batches))
    name, parameter = trainer.replicas[0].named[0]
    expected = parameter.detach().clone().cpu()
    if share:  # as processes of one host have it
        exchange = trainer.replicas[0].exchange
        exchange.ownership = replace(exchange.ownership, memory="shared")
    path = trainer.save(wait=False)
    with torch.no_grad():
        for replica in trainer.replicas:
            replica.named[0][1].mul_(2)
    go.set()
    batches.close()
    if not share:
        trainer.close()
        assert torch.equal(Checkpoint.open(path).weights()[name], expected)
        return
    with pytest.raises(
        CheckpointError, match=f"{name} was changed outside the optimizer while it was copied"
    ):
        trainer.close()
    assert checkpoints_in(tmp_path) == ["step-00000001"]


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Threads that save copy nothing before it is set."""
    go, real = threading.Event(), HostCopy.finish

    def finish(copy: HostCopy) -> None:
        if threading.current_thread().name.startswith("saving"):
            assert go.wait(HELD_SECONDS)
        real(copy)

    monkeypatch.setattr(HostCopy, "finish", finish)
    return go


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
@pytest.mark.parametrize("plan", PLANS[:10])
def test_state_of_any_optimizer(plan: str, optimizer: str, held: Held, tmp_path: Path) -> None:
    train(job_of(optimizer=optimizer, checkpoint="foreground"), plan, tmp_path / "foreground")
    train(job_of(optimizer=optimizer), plan, tmp_path / "background", let_go_after_step_3(held))
    assert_equal(tmp_path / "background", tmp_path / "foreground")


@pytest.mark.parametrize(
    ("plan", "other"), [("dp=3", "dp=2"), ("dp=2,zero=3", "tp=2"), ("tp=2", "dp=3,zero=1"), ("pp=2", "dp=1")]
)
@pytest.mark.slow
def test_a_run_goes_on_from_it_under_another_plan(plan: str, other: str, tmp_path: Path) -> None:
    train(job_of(steps=3), plan, tmp_path)
    shutil.rmtree(tmp_path / "step-00000003")
    train(job_of(steps=3), other, tmp_path, resume=tmp_path)
    train(job_of(steps=3), "dp=1", tmp_path / "alone")
    found, expected = (Checkpoint.open(path).weights() for path in (tmp_path, tmp_path / "alone"))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)  # sum order


@pytest.mark.long
def test_training_goes_on_and_the_checkpoint_before_stays(held: Held, tmp_path: Path) -> None:
    held.go.set()
    with Trainer(job_of(), "dp=2", devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        batches = cast(Generator[Batch], trainer.batches())
        trainer.step(next(batches))
        first = trainer.save()
        assert checkpoints_in(tmp_path) == ["step-00000001"] and Checkpoint.open(first).step == 1
        trainer.step(next(batches))
        held.go.clear()
        second = trainer.save(wait=False)
        assert second == tmp_path / "step-00000002"
        trainer.step(next(batches))
        assert held.there.wait(HELD_SECONDS)  # the thread's directory is there
        assert checkpoints_in(tmp_path) == [".saving-step-00000002", "step-00000001"]
        assert Checkpoint.open(tmp_path).step == 1
        held.go.set()
        batches.close()
    assert checkpoints_in(tmp_path) == ["step-00000001", "step-00000002"]
    assert Checkpoint.open(tmp_path).step == 2


@pytest.mark.long
def test_a_save_waits_for_the_one_under_way_and_says_so(held: Held, tmp_path: Path) -> None:
    timer = threading.Timer(0.2, held.go.set)
    notes = train(
        job_of(steps=3, checkpoint_every=1),
        "dp=2",
        tmp_path,
        lambda step: timer.start() if step == 2 else None,
    )
    assert any(
        re.fullmatch(
            r"Training waited .* before saving step 2: the checkpoint of step 1 was still being written. With a larger checkpoint_every it need not.",
            note,
        )
        for note in notes
    )
    assert checkpoints_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_progress_says_how_much_of_a_save_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, go, half = parallel.write_parts, threading.Event(), threading.Event()

    def write(
        temporary: Path, layout: Any, parts: Any, let_go: Any, told: Callable[[int, int], None]
    ) -> None:
        if threading.current_thread().name.startswith("saving"):
            told(5, 10)
            half.set()
            assert go.wait(HELD_SECONDS)
        real(temporary, layout, parts, let_go, told)

    monkeypatch.setattr(parallel, "write_parts", write)
    seen: list[float | None] = []

    def step(progress: Progress) -> None:
        seen.append(progress.saving)
        if progress.step == 3:
            assert half.wait(HELD_SECONDS)
        elif progress.step == 4:
            go.set()

    listener = Listener(started=lambda text: None, note=lambda text: None, step=step)
    fitted(job_of(), "dp=2", out=tmp_path, listener=listener)
    assert seen[:2] == [None, None] and seen[2] in (0.0, 0.5) and seen[3] == 0.5


@pytest.mark.long
def test_each_rank_copies_what_it_writes_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copied: dict[str, int] = {}  # by rank

    class Counted(HostCopy):
        def __init__(self, divided: DividedState, memory: CopyMemory, **how: Any) -> None:
            super().__init__(divided, memory, **how)
            copied[threading.current_thread().name] = sum(part.nbytes for _, part in divided.parts)

    monkeypatch.setattr(run_checkpoints, "HostCopy", Counted)
    notes = train(job_of("gpt", steps=3), "dp=3", tmp_path)
    state = Checkpoint.open(tmp_path / "step-00000002")
    size = sum(each.nbytes for each in state.weights().values()) + sum(
        state.read(key, 0, math.prod(state.shape(key))).nbytes
        for key in state.keys()  # noqa: SIM118
    )
    assert len(copied) == 3 and sum(copied.values()) == size and max(copied.values()) < 0.4 * size
    assert notes[0] == (
        f"Checkpoints are written in the background, from a copy of the state in host memory: {format_bytes(size)} ({format_bytes(copied['rank 0'])} of it on rank 0), "
        "kept from one to the next."
    )


@pytest.mark.long
def test_a_copy_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_checkpoints, "HostCopy", lambda *_, **__: pytest.fail("it was copied"))
    monkeypatch.setattr(run_checkpoints, "regained_bytes", lambda: 1000)
    monkeypatch.setattr(run_checkpoints, "free_bytes", lambda: 2000)
    notes = train(job_of(steps=3), "dp=2", tmp_path)
    assert any(
        note.startswith("Step 2 is saved in the foreground: a copy of its state, ")
        and note.endswith(
            "does not fit in the 1.95 KiB of host memory that are free, of which the next steps may take 1000 B."
        )
        for note in notes
    ), notes
    assert checkpoints_in(tmp_path) == ["step-00000002", "step-00000003"]


def test_memory_that_was_held_and_given_back_is_expected_again() -> None:
    held = torch.ones(64 * 2**20)  # 256 MiB, which the C library returns when they are freed
    before = regained_bytes()
    del held
    assert regained_bytes() >= before + 200 * 2**20


@pytest.mark.long
def test_ranks_of_several_hosts_save_in_the_foreground(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(run_checkpoints, "host_identity", lambda: f"host{next(numbers)}")
    notes = train(job_of(steps=3), "dp=2", tmp_path)
    assert notes[0].startswith("Checkpoints are written in the foreground: the ranks are on 2 hosts")
    assert checkpoints_in(tmp_path) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.long
def test_a_full_disk_is_one_sentence_after_the_next_step(rank: int, held: Held, tmp_path: Path) -> None:
    held.failing = rank + 1
    with Trainer(job_of(), "dp=2", devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        batches = cast(Generator[Batch], trainer.batches())
        trainer.step(next(batches))
        trainer.save()
        trainer.step(next(batches))
        trainer.save(wait=False)
        held.go.set()
        for thread in [each for each in threading.enumerate() if each.name == "saving step 2"]:
            thread.join()
        with pytest.raises(CheckpointError) as failure:
            trainer.step(next(batches))
        batches.close()
    assert re.match(
        rf"Rank {rank} cannot save step 2 in {tmp_path}: No space left on device. It needs .* there, and .* are free. The checkpoint before it is whole: "
        rf"{tmp_path / 'step-00000001'}.$",
        str(failure.value),
    ), failure.value
    assert checkpoints_in(tmp_path) == ["step-00000001"] and Checkpoint.open(tmp_path).step == 1


@pytest.mark.long
def test_a_directory_that_vanishes_is_one_sentence(held: Held, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def vanish(step: int) -> None:
        if step == 3:
            assert held.there.wait(HELD_SECONDS)
            shutil.rmtree(out)
            held.go.set()

    with pytest.raises(
        CheckpointError, match="cannot save step 2 in .*: it does not see .*; all ranks must save to one"
    ):
        train(job_of(steps=8), "dp=2", out, vanish)


@pytest.mark.long
def test_the_end_waits_and_tells_what_failed(held: Held, tmp_path: Path) -> None:
    held.failing = 1
    trainer = Trainer(job_of(), "dp=2", devices="simulated", out=tmp_path, listener=QUIET)
    batches = cast(Generator[Batch], trainer.batches())
    trainer.step(next(batches))
    trainer.save(wait=False)
    batches.close()
    held.go.set()
    with pytest.raises(CheckpointError, match="Rank 0 cannot save step 1 in .*: No space left on device"):
        trainer.close()
    assert names_in(tmp_path) == []


@pytest.mark.long
def test_an_error_of_the_loop_stays_what_it_is_and_the_save_is_finished(held: Held, tmp_path: Path) -> None:
    held.go.set()

    def fail(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(job_of(checkpoint_every=1), "dp=2", tmp_path, lambda step: fail(step) if step == 2 else None)
    assert checkpoints_in(tmp_path) == ["step-00000001"] and Checkpoint.open(tmp_path).step == 1


@pytest.mark.long
def test_a_signal_waits_for_the_save_under_way(
    held: Held, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def act(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
            held.go.set()

    with pytest.raises(SystemExit):
        train(job_of(steps=9), "dp=2", tmp_path, act)
    assert capfd.readouterr().err.endswith(
        f"Stopped by SIGTERM after step 3 of 9, which is saved. Go on with --resume {tmp_path}.\n"
    )
    assert checkpoints_in(tmp_path) == ["step-00000002", "step-00000003"]


def test_what_cannot_be_asked() -> None:
    with pytest.raises(JobError, match=r"Job\(checkpoint='async'\) must be 'foreground' or 'background'"):
        job_of(checkpoint="async")
    with pytest.raises(JobError, match="with exchange=async checkpoints are made of the servers' snapshots"):
        Trainer(job_of(), "dp=2,exchange=async", devices="simulated", listener=QUIET)


def one_of_processes(
    directory: str, how: str, plan: str, transport: str, share: bool, failing: int | None
) -> str:
    """Trains on rank processes; what was raised."""
    patch = pytest.MonkeyPatch()
    found = Held(patch)
    found.go.set()
    found.failing = 1 if failing is not None and failing == int(os.environ["RANK"]) else None
    try:
        fitted(
            job_of("gpt", checkpoint=how),
            plan,
            devices="cpu",
            out=directory,
            transport=transport,
            share=share,
            listener=QUIET,
        )
    except CheckpointError as error:
        return str(error)
    finally:
        patch.undo()
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "transport", "share"),
    few(
        [
            ("dp=2", "auto", True),
            ("dp=2,zero=3", "gloo", False),
            ("dp=2", "auto", False),
            ("tp=2", "auto", True),
            ("pp=2", "gloo", False),
        ],
        2,
        pytest.mark.slow,
    ),
)
def test_processes_write_the_same_files(plan: str, transport: str, share: bool, tmp_path: Path) -> None:
    for how in ("foreground", "background"):
        assert on_ranks(one_of_processes, 2, str(tmp_path / how), how, plan, transport, share, None) == [
            "",
            "",
        ]
    assert_equal(tmp_path / "background", tmp_path / "foreground")


@pytest.mark.processes
def test_a_process_that_cannot_write_is_one_sentence_on_all(tmp_path: Path) -> None:
    one, other = on_ranks(one_of_processes, 2, str(tmp_path), "background", "dp=2", "auto", True, 1)
    assert one == other and one.startswith(
        f"Rank 1 cannot save step 2 in {tmp_path}: No space left on device."
    )
    assert checkpoints_in(tmp_path) == []
