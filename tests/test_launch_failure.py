"""One message says what ended a rank: the error, the rank and its place, the line of the user's own code."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from meshloom.errors import DataError, DeviceError, PeerLostError, PlanError
from meshloom.launch.failure import own_line, report_failure
from meshloom.mesh import Mesh
from meshloom.plan import Plan


def _fail_deep(text: str) -> None:
    raise ValueError(text)  # the user's line


def _caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_users_own_line_is_the_deepest_outside_of_libraries():
    def through_torch() -> None:
        torch.utils._pytree.tree_map(_fail_deep, ["boom"])

    assert own_line(_caught(through_torch)).endswith("raise ValueError(text)  # the user's line")


def test_the_users_own_line_comes_from_the_cause():
    def wrapped() -> None:
        try:
            _fail_deep("boom")
        except ValueError as error:
            raise DataError("The data cannot be read.") from error

    assert "the user's line" in own_line(_caught(wrapped))


class _Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise KeyError("no such sample")  # in a data worker


@pytest.mark.long
def test_the_users_own_line_in_a_data_worker_is_found():
    loader = torch.utils.data.DataLoader(_Broken(), num_workers=1)
    assert "# in a data worker" in own_line(_caught(lambda: list(loader)))
    gc.collect()  # the traceback holds the iterator, which holds the worker


def test_meshlooms_own_lines_are_not_the_users():
    def through_meshloom() -> None:
        Plan.parse("dp=0")  # the user's line

    assert own_line(_caught(through_meshloom)).endswith('Plan.parse("dp=0")  # the user\'s line')


def test_an_error_without_a_users_line_has_none():
    assert own_line(PlanError("dp=0 must be 1 or more.")) == ""


def _as_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def test_a_failure_under_torchrun_is_printed_with_rank_and_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    _as_rank(monkeypatch)
    assert report_failure(_caught(lambda: _fail_deep("boom")), Mesh(dp=4)) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    *_, message, line = text.strip().splitlines()
    assert message == "ValueError on rank 2 (dp=2): boom"
    assert line.startswith("  ") and "test_launch_failure.py:" in line and line.endswith("# the user's line")


def test_a_known_error_has_no_traceback_and_a_lost_peer_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    _as_rank(monkeypatch)
    assert report_failure(PlanError("dp=0 must be 1 or more.")) == 2
    assert report_failure(PeerLostError("rank 2 lost rank 1.\nmore")) == 1
    assert capsys.readouterr().err == "PlanError on rank 2: dp=0 must be 1 or more.\nPeerLostError on rank 2: rank 2 lost rank 1.\n"


def test_an_interrupt_and_an_exit_are_no_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    _as_rank(monkeypatch)
    assert (report_failure(KeyboardInterrupt()), report_failure(SystemExit(3)), report_failure(SystemExit()), report_failure(SystemExit("no"))) == (
        130,
        3,
        0,
        1,
    )
    assert capsys.readouterr().err == ""


def test_half_an_environment_does_not_hide_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Finding this rank's name failed in turn, and the message was a traceback of the reporting."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert report_failure(DeviceError("MASTER_ADDR is not set.")) == 2
    assert capsys.readouterr().err == "DeviceError: MASTER_ADDR is not set.\n"
