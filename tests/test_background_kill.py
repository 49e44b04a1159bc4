"""Whatever happens while a checkpoint is written in the background, at whichever byte: the newest whole one loads, with
the bits that it should have, and once the run has gone on nothing is left over.

A rank is killed, its disk is full, or a file loses its end; counted are the bytes that its thread writes.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import committed
from meshloom.checkpoint.tensor_file import tensor_bytes
from meshloom.checkpoint.writing import parallel, saving
from meshloom.core.errors import CheckpointError, MeshloomError
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.processes import on_ranks
from tests.saving_jobs import names_in

pytestmark = [pytest.mark.processes]

Event = Literal["", "kill", "full", "truncate"]
RUNS = [  # plan and transport
    ("dp=2", "auto"), ("dp=2,zero=3", "gloo"), ("tp=2", "auto"), ("pp=2", "auto"), ("dp=2,zero=1", "auto"),
]  # fmt: skip
SAVED = [2, 4]  # in the background; and 6, the last step, which is not


class Disk:
    """What happens to this rank when its saving threads have written `at` bytes. written: by the end of each save."""

    def __init__(self, event: Event, at: int, patch: pytest.MonkeyPatch) -> None:
        self._event, self._at, self._count = event, at, 0
        self._truncating = False
        self.written: dict[str, int] = {}
        for module, name in (
            (os, "pwrite"),
            (saving, "write_synced"),
            (parallel, "create_files"),
            (parallel, "map_bytes"),
        ):
            patch.setattr(module, name, getattr(self, name)(getattr(module, name)))
        patch.setattr(parallel, "sum_of_share", self.sum_of_share(parallel.sum_of_share))

    def _passes(self, num_bytes: int) -> int:
        """How many of these bytes are written before it happens; all: it does not."""
        thread = threading.current_thread().name
        if not thread.startswith("saving"):
            return num_bytes
        left = self._at - self._count
        self._count += num_bytes
        self.written[thread] = self._count
        return num_bytes if not self._event or not 0 <= left < num_bytes else left

    def _happen(self) -> None:
        if self._event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._event == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._truncating = True

    def sum_of_share(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A file loses its end once everybody has written."""

        def summed(temporary: Path, *more: Any) -> Any:
            if self._truncating:
                path = sorted(temporary.glob("*.safetensors"))[self._at % 2]
                os.truncate(path, self._at % path.stat().st_size)
            return real(temporary, *more)

        return summed

    def pwrite(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, data: memoryview, position: int) -> int:
            count = self._passes(len(data))
            if count == len(data):
                return real(descriptor, data, position)
            real(descriptor, data[:count], position)
            self._happen()
            return count + real(descriptor, data[count:], position + count)

        return write

    def write_synced(self, real: Callable[..., None]) -> Callable[..., None]:
        def write(path: Path, content: bytes) -> None:
            if (count := self._passes(len(content))) < len(content):
                path.write_bytes(content[:count])
                self._happen()
                path.unlink()
            real(path, content)

        return write

    def create_files(self, real: Callable[..., None]) -> Callable[..., None]:
        def create(temporary: Path, files: Any) -> None:
            if self._passes(size := sum(len(each.header) for each in files)) < size:
                self._happen()
            real(temporary, files)

        return create

    def map_bytes(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def mapped(path: Path, start: int, count: int, **how: Any) -> Any:
            if self._passes(count) < count:
                self._happen()
            return real(path, start, count, **how)

        return mapped


def train(
    directory: str, run: tuple[str, str], event: Event, at: int, who: int, how: str = "background"
) -> Any:
    """On a rank: bytes written by the end of each save in the background, or what was raised."""
    patch = pytest.MonkeyPatch()
    disk = Disk(event if int(os.environ["RANK"]) == who else "", at, patch)
    job = make_job("mlp", "adamw", steps=6, checkpoint_every=2, checkpoint=how, keep_checkpoints=1)
    out = Path(directory)
    resume = out if out.is_dir() and committed(out) else None
    try:
        with Trainer(
            job, run[0], devices="cpu", transport=run[1], out=out, resume=resume, share=True, listener=QUIET
        ) as trainer:
            trainer.fit()
    except MeshloomError as error:
        return str(error)
    finally:
        patch.undo()
    return disk.written


@cache
def written_by(run: tuple[str, str], directory: Path) -> list[list[int]]:
    """By rank, the bytes that its thread has written by the end of each save of a run in which nothing happens."""
    found = on_ranks(train, 2, str(directory), run, "", 0, 0)
    return [[each[f"saving step {step}"] for step in SAVED] for each in found]


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor's bytes, by name: after resuming, state is in another order."""
    tensors = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    return {name: bytes(tensor_bytes(each)) for file in tensors for name, each in file.items()}


@cache
def expected(run: tuple[str, str], directory: Path) -> dict[int, dict[str, bytes]]:
    """The files of a run that stands still, by step."""
    found: dict[int, dict[str, bytes]] = {}
    for steps in (*SAVED, 6):
        out = directory / str(steps)
        on_ranks(train_foreground, 2, str(out), run, steps)
        found[steps] = tensors_of(out / f"step-{steps:08d}")
    return found


def train_foreground(directory: str, run: tuple[str, str], steps: int) -> None:
    job = make_job("mlp", "adamw", steps=6, checkpoint_every=2, keep_checkpoints=1)
    with Trainer(
        job, run[0], devices="cpu", transport=run[1], out=directory, share=True, listener=QUIET
    ) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            if batch.step + 1 == steps:
                trainer.save()


def attempt(run: tuple[str, str], event: Event, who: int, moment: float, tmp_path: Path) -> str:
    """Something happens at a moment between 0 and 1 of what rank `who` writes in the background; what was seen."""
    written = written_by(run, tmp_path.parent / f"counted-{run[0]}")[who]
    right = expected(run, tmp_path.parent / f"expected-{run[0]}")
    at, out = int(written[-1] * moment), tmp_path / "run"
    may_die = {who} if event == "kill" else set[int]()
    told = on_ranks(train, 2, str(out), run, event, at, who, may_die=may_die)
    whole = committed(out)
    if at >= written[0]:
        assert whole, "the first checkpoint was whole, and is gone"
    if event != "kill":
        assert told[0] == told[1]
        assert "cannot save step" in told[0], told
        assert [name for name in names_in(out) if name.startswith(".")] == []
    if whole:
        newest = Checkpoint.open(out)
        assert newest.path == whole[0]
        assert tensors_of(newest.path) == right[newest.step]
    else:
        with pytest.raises(CheckpointError, match=r"There is no (checkpoint in|directory)"):
            Checkpoint.open(out)
    on_ranks(train, 2, str(out), run, "", 0, 0)
    assert [name for name in names_in(out) if name != "timeline.json"] == ["step-00000006"]
    assert tensors_of(out / "step-00000006") == right[6]
    return f"{event} at byte {at} of {written[-1]}, newest whole {whole[0].name if whole else 'none'}"


@pytest.mark.parametrize(
    ("event", "who", "moment"), [("kill", 1, 0.8), ("full", 0, 0.3), ("truncate", 1, 0.7)]
)
def test_what_happens_in_the_middle_of_a_save(event: Event, who: int, moment: float, tmp_path: Path) -> None:
    print(attempt(RUNS[0], event, who, moment, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", RUNS, ids=[plan for plan, _ in RUNS])
def test_sixty_moments(run: tuple[str, str], tmp_path: Path) -> None:
    """Fifteen for each plan, of which ten are kills."""
    chooser = random.Random(run[0])
    for number in range(15):
        event: Event = "kill" if number < 10 else "full" if number < 13 else "truncate"
        print(attempt(run, event, chooser.randrange(2), chooser.random(), tmp_path / str(number)))
