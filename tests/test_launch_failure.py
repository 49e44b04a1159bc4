"""One message says what ended a rank: the error, the rank and its place, the line of the user's own code."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch
from torch import nn

from meshloom.core.errors import DataError, DeviceError, PeerLostError, PlanError
from meshloom.core.jobfile import load_job
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws
from meshloom.launch.failure import own_line, own_lines, report_failure


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


def test_a_line_of_python_itself_is_nobodys():
    """A metric that returns a wrong value is found behind a context manager, when no line of the user's runs."""
    error = _caught(lambda: json.loads("x"))
    assert "json.loads" in own_line(error)
    assert error.__traceback__ is not None
    while error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next
    assert own_line(error) == ""


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


def test_meshlooms_own_lines_are_not_the_users():
    def through_meshloom() -> None:
        Plan.parse("dp=0")  # the user's line

    assert own_line(_caught(through_meshloom)).endswith('Plan.parse("dp=0")  # the user\'s line')


def test_a_mode_of_ours_that_calls_the_users_operator_has_no_part_in_its_error():
    """The whole traceback was shown of a model function whose operators a mode saw."""

    def build() -> nn.Module:
        torch.ones(3) @ torch.ones(4)  # the user's line
        return nn.Linear(1, 1)

    def called() -> None:
        with KeyedDraws():
            build()

    lines = own_lines(_caught(called))
    assert lines.endswith("torch.ones(3) @ torch.ones(4)  # the user's line")


def test_an_error_without_a_users_line_has_none():
    assert own_line(PlanError("dp=0 must be 1 or more.")) == ""


def _as_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_failure_under_torchrun_is_printed_with_rank_and_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _as_rank(monkeypatch)
    assert report_failure(_caught(lambda: _fail_deep("boom")), Mesh(dp=4)) == 1
    message, *_, line = capsys.readouterr().err.strip().splitlines()
    assert message == "ValueError on rank 2 (dp=2): boom"
    assert line.startswith("  ") and "test_launch_failure.py:" in line and line.endswith("# the user's line")


def test_an_error_in_the_users_code_has_his_lines_alone_and_its_message_once(
    capsys: pytest.CaptureFixture[str],
):
    """There were 60 lines of meshloom's and torch's frames around two of the user's, and the message stood
    there twice."""

    def through_torch() -> None:
        torch.utils._pytree.tree_map(_fail_deep, ["boom"])  # on the way

    report_failure(_caught(through_torch))
    message, *lines = capsys.readouterr().err.splitlines()
    assert message == "ValueError: boom"
    assert [line.partition(": ")[2] for line in lines[-2:]] == [
        'torch.utils._pytree.tree_map(_fail_deep, ["boom"])  # on the way',
        "raise ValueError(text)  # the user's line",
    ]
    assert all(line.startswith("  ") and "test_launch_failure.py:" in line for line in lines)


def test_all_frames_are_shown_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MESHLOOM_TRACEBACK", "full")
    report_failure(_caught(lambda: torch.utils._pytree.tree_map(_fail_deep, ["boom"])))
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    assert "_pytree.py" in text and text.count("boom") == 2  # once in the line that is shown
    assert text.splitlines()[-1].endswith("# the user's line")


def test_an_error_of_meshlooms_own_shows_all_frames(capsys: pytest.CaptureFixture[str]):
    """The line that called it is not to blame, and a report needs the rest."""
    report_failure(_caught(lambda: Plan.parse(None)))  # type: ignore[arg-type]
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    assert "AttributeError: 'NoneType' object has no attribute 'split'" in text


def test_causes_and_notes_are_told_and_the_first_cause_comes_last(capsys: pytest.CaptureFixture[str]):
    def wrapped() -> None:
        try:
            _fail_deep("boom")
        except ValueError as error:
            error.add_note("on simulated rank 1 (dp=1)")
            raise KeyError("bad batch") from error

    report_failure(_caught(wrapped))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "KeyError: 'bad batch'"
    assert "  caused by ValueError: boom" in lines and "  on simulated rank 1 (dp=1)" in lines
    assert lines[-1].endswith("# the user's line")


def test_a_file_that_python_cannot_parse_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "job.py"
    path.write_text("import torch\nmodel = torch.nn.Linear(2,\n")
    report_failure(_caught(lambda: load_job(str(path))))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "SyntaxError: '(' was never closed"
    assert lines[-1] == f"  {path}:2: model = torch.nn.Linear(2,"


def test_a_function_that_calls_itself_is_not_told_a_thousand_times(capsys: pytest.CaptureFixture[str]):
    def deeper() -> None:
        deeper()

    report_failure(_caught(deeper))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 22 and "  ..." in lines


@pytest.mark.slow
def test_an_error_in_a_data_worker_reads_like_any_other(capsys: pytest.CaptureFixture[str]):
    loader = torch.utils.data.DataLoader(_Broken(), num_workers=1)
    error = _caught(lambda: list(loader))
    report_failure(error)
    assert "# in a data worker" in own_line(error)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "KeyError: 'no such sample' (in a data worker)"
    assert lines[-1].endswith("# in a data worker") and not any("site-packages" in line for line in lines)
    del error
    gc.collect()  # the traceback holds the iterator, which holds the worker


def test_what_autograd_says_in_backward_is_not_drowned(capsys: pytest.CaptureFixture[str]):
    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y.add_(1)
        y.sum().backward()

    error = _caught(backward)
    own = [each for each in _frames_of(error) if "torch" in each.tb_frame.f_code.co_filename]
    report_failure(error.with_traceback(own[0]))  # as it comes out of a step, where no frame is the user's
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("RuntimeError: one of the variables needed for gradient computation")
    assert lines[1:] == [
        "  in backward, where no line of yours runs. torch.autograd.set_detect_anomaly(True) in the job file shows which one led to it."
    ]


def _frames_of(error: BaseException) -> list[TracebackType]:
    found, trace = [], error.__traceback__
    while trace:
        found.append(trace)
        trace = trace.tb_next
    return found


def test_a_known_error_has_no_traceback_and_a_lost_peer_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _as_rank(monkeypatch)
    assert report_failure(PlanError("dp=0 must be 1 or more.")) == 2
    assert report_failure(PeerLostError("rank 2 lost rank 1.\nmore")) == 1
    assert (
        capsys.readouterr().err
        == "PlanError on rank 2: dp=0 must be 1 or more.\nPeerLostError on rank 2: rank 2 lost rank 1.\n"
    )


def test_an_interrupt_is_no_message_and_an_exit_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _as_rank(monkeypatch)
    assert (
        report_failure(KeyboardInterrupt()),
        report_failure(SystemExit(3)),
        report_failure(SystemExit()),
        report_failure(SystemExit("no")),
    ) == (
        130,
        3,
        0,
        1,
    )
    assert capsys.readouterr().err == "no\n"


def test_half_an_environment_does_not_hide_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Finding this rank's name failed in turn, and the message was a traceback of the reporting."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert report_failure(DeviceError("MASTER_ADDR is not set.")) == 2
    assert capsys.readouterr().err == "DeviceError: MASTER_ADDR is not set.\n"
