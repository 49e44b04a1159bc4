"""What fails in the job's own code comes out with the sample and the user's line, from a worker too."""

from __future__ import annotations

import importlib
import inspect
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reading_jobs import job_of, read_chunks

from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import DataError
from meshloom.core.plan import Plan
from meshloom.data.job_data import open_reader
from meshloom.data.reading import WorkerError
from meshloom.launch.failure import own_line


class Broken:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("this picture\nis broken")
        return torch.tensor(index)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_error_in_a_dataset_names_sample_and_line(num_workers):
    line = line_of(Broken, "raise ValueError")
    message = rf"Reading sample 5 \(step 1\) failed at {__file__}:{line} in __getitem__: ValueError: this picture is broken$"
    with pytest.raises(DataError, match=message) as caught:
        read_chunks(job_of(Broken(), num_workers=num_workers, shuffle=False), Plan(dp=2), 0, 2)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerError if num_workers else ValueError)
    assert not num_workers or 'raise ValueError("this picture' in str(cause)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_error_in_collate_names_chunk_samples_and_line(num_workers):
    def collate(samples):
        return samples[9]

    line = line_of(collate, "return samples[9]")
    message = (
        rf"Collating chunk 1 of step 0 \(samples 2, 3\) failed at {__file__}:{line} in collate: IndexError"
    )
    with pytest.raises(DataError, match=message):
        read_chunks(
            job_of(
                list(range(8)),
                collate=lambda s: collate(s) if 3 in s else s,
                num_workers=num_workers,
                shuffle=False,
            ),
            Plan(microbatches=2),
            0,
            2,
        )


def test_error_inside_a_library_names_the_users_line():
    class Calls:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.utils.data.default_collate([torch.ones(1), torch.ones(2)])

    with pytest.raises(
        DataError,
        match=rf"failed at {__file__}:{line_of(Calls, 'default_collate')} in __getitem__: RuntimeError",
    ):
        read_chunks(job_of(Calls()), Plan(), 0, 1)


def test_a_library_of_an_environment_beneath_is_none_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As of a virtual environment that sees the packages of another one."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "lying_beneath.py").write_text("def fail():\n    raise ValueError('no')\n")
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("lying_beneath")

    class Calls:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return library.fail()

    line = line_of(Calls, "library.fail")
    with pytest.raises(DataError, match=rf"failed at {__file__}:{line} in __getitem__: ValueError") as raised:
        read_chunks(job_of(Calls()), Plan(), 0, 1)
    assert isinstance(raised.value.__cause__, ValueError)
    assert own_line(raised.value.__cause__).startswith(f"tests/test_reading.py:{line}: ")


def test_samples_that_do_not_stack_are_named():
    with pytest.raises(
        DataError,
        match=r"Collating chunk 0 of step 0 \(samples 0, 1\) failed at .*: RuntimeError: stack expects",
    ):
        read_chunks(job_of([torch.ones(1), torch.ones(2)], shuffle=False), Plan(), 0, 1)


@pytest.mark.processes
def test_batch_that_a_worker_cannot_send():
    with pytest.raises(DataError, match=r"Collating chunk 0 of step 0 .* failed"):
        read_chunks(job_of([1, 2], collate=lambda samples: lambda: samples, num_workers=1), Plan(), 0, 1)


@pytest.mark.processes
def test_workers_end_with_their_rank():
    readable, writable = os.pipe()
    rank = os.fork()
    if rank == 0:
        os.close(readable)  # the write end is inherited by the workers, as a connection to a peer would be
        reader = open_reader(
            job_of([1, 2, 3, 4], batch_size=1, num_workers=2), Plan(), simulated_groups(1)[0], 0, 100
        )
        reader.read(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writable)
    os.waitpid(rank, 0)
    assert select.select([readable], [], [], 2.0)[0]  # torch's own watchdog takes up to 5 s
    assert os.read(readable, 1) == b""
    os.close(readable)


@pytest.mark.processes
def test_killed_worker():
    class Kills:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        DataError,
        match="The processes that read data failed: process \\d+ was killed by SIGKILL .* Job.num_workers=0. reads in the rank's own process",
    ):
        read_chunks(job_of(Kills(), num_workers=1), Plan(), 0, 1)


def test_a_worker_that_is_killed_as_it_hands_a_batch_over(monkeypatch: pytest.MonkeyPatch):
    """The connection on which it sends a tensor's memory is reset, of which torch says nothing of its own."""

    def broken(*_: object) -> Iterator[None]:
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    monkeypatch.setattr("meshloom.data.reading_ahead._without_handler", broken)
    with pytest.raises(DataError, match=r"^The processes that read data failed: .*Connection reset by peer"):
        read_chunks(job_of(range(4), num_workers=1), Plan(), 0, 1)
