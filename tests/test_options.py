"""Options of asynchronous runs that would mean nothing are refused in one sentence."""

from __future__ import annotations

import pytest

from meshloom.cli.main import main
from meshloom.core.errors import DeviceError
from meshloom.launch.devices import choose_for_workers
from tests.machine import machine

FILE = "tests/job_file.py"
ASYNC = ("--plan", "dp=2,exchange=async")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--plan", "dp=2", "--snapshot-every", "5"),
            "--snapshot-every is for exchange=async, and the plan is dp=2",
        ),
        (("--plan", "dp=2", "--listen", "127.0.0.1:0"), "--listen is for exchange=async"),
        (("--plan", "dp=2", "--incidents", "kill:1@3"), "--incidents is for exchange=async"),
        ((*ASYNC, "--devices", "cuda"), "not on devices=cuda"),
        ((*ASYNC, "--devices", "cpu", "--step-seconds", "1,2"), "of a virtual clock"),
        ((*ASYNC, "--devices", "simulated", "--listen", "127.0.0.1:0"), "--listen is for processes"),
        ((*ASYNC, "--devices", "cpu", "--listen", "nowhere"), "'nowhere' is not an address"),
        ((*ASYNC, "--devices", "cpu", "--snapshot-every", "0"), "snapshot_every=0 must be 1 or more"),
        (("--join", "127.0.0.1:9"), "--join needs --key FILE"),
        (("--key", "worker.key"), "--key is for --join"),
        (("--join", "127.0.0.1:9", "--key", "worker.key", "--steps", "3"), "--steps is for the run itself"),
        (("--join", "127.0.0.1:9", "--key", "/nowhere/worker.key"), "/nowhere/worker.key cannot be read"),
    ],
)
def test_what_means_nothing_is_refused(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", FILE, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_workers_are_processes_where_there_is_a_core_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0, 4)
    assert choose_for_workers(2, 4)[0] == "cpu"
    assert choose_for_workers(2, 5)[0] == "simulated"
    assert choose_for_workers(2, 5, "cpu")[0] == "cpu"
    assert choose_for_workers(2, 4, virtual=True)[0] == "simulated"
    assert "5 workers are more than 4 cores" in choose_for_workers(2, 5)[1]
    with pytest.raises(DeviceError, match="CPU processes or simulated"):
        choose_for_workers(1, 2, "cuda")
