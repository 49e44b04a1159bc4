"""A server's snapshots on disk are whole or not there, and its numbers survive it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from meshloom.asynchronous.state.parameters import Content, Parameters
from meshloom.asynchronous.state.snapshots import MappedNumbers, SnapshotFiles, read_snapshot, snapshot_name
from tests.jobs import make_job

FIRST = {"next_share": 0, "ages": {}}


def parameters(content: Content | None, servers: int = 2) -> list[Parameters]:
    job = make_job("cnn", "adamw")
    return [
        Parameters(
            job,
            number,
            servers,
            whole=False,
            device=torch.device("cpu"),
            dtype=None,
            content=content if number == 0 else None,
        )
        for number in range(servers)
    ]


def updated() -> Parameters:
    here = parameters(None)[0]
    for number in range(3):
        here.apply(
            [torch.full_like(value, 0.1 + number) for value in here.values()[0]],
            None,
            loss=1.0,
            norm=2.0,
            rate=1.0,
        )
    return here


def test_what_was_kept_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    here = updated()
    files = SnapshotFiles(tmp_path, (0, FIRST, None))
    files[3] = {"next_share": 7, "ages": {"1": 2}}, here.snapshot()
    state, content = SnapshotFiles(tmp_path, (0, FIRST, None))[3]
    assert state == {"next_share": 7, "ages": {"1": 2}}
    again = parameters(content)[0]
    for each in (here, again):
        each.apply(
            [torch.full_like(value, -0.3) for value in each.values()[0]], None, loss=1.0, norm=2.0, rate=0.5
        )
    for a, b in zip(here.values()[0], again.values()[0], strict=True):
        assert torch.equal(a, b)
    assert here.values()[1].keys() == again.values()[1].keys()
    assert here.learning_rates() == again.learning_rates()


def test_snapshots_come_are_replaced_and_go(tmp_path: Path) -> None:
    content = updated().snapshot()
    files = SnapshotFiles(tmp_path, (0, FIRST, None))
    assert list(files) == [0] and files[0] == (FIRST, None)
    files[10] = 1, content
    os.link(files.path(10), tmp_path / "second name")
    files[10] = 2, content
    files[20] = 2, content
    states = {version: state for version, (state, _) in SnapshotFiles(tmp_path, (0, FIRST, None)).items()}
    assert states == {0: FIRST, 10: 2, 20: 2}
    assert read_snapshot(tmp_path / "second name")[0] == 1
    del files[0]
    del files[10]
    assert list(files) == [20]
    assert not (tmp_path / snapshot_name(10)).exists()
    with pytest.raises(KeyError):
        files[10]


def test_what_a_kill_left_half_written_does_not_count(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path, (0, FIRST, None))
    files[10] = None, updated().snapshot()
    (tmp_path / ".20").write_bytes(files.path(10).read_bytes()[:100])
    assert list(SnapshotFiles(tmp_path, (0, FIRST, None))) == [0, 10]
    assert not (tmp_path / ".20").exists()


def test_numbers_stay_when_a_process_dies(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        numbers = MappedNumbers(tmp_path / "numbers")
        numbers.next_share, numbers.next_worker = 41, 7
        os.write(writer, b"x")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    numbers = MappedNumbers(tmp_path / "numbers")
    assert (numbers.next_share, numbers.next_worker) == (41, 7)
    numbers.close()
