"""A signal to the launcher ends all ranks; so does the guard when the launcher is killed. It runs in a
process of its own."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
from launch_scripts import TELL, left, run, write_script
from processes import CONTEXT

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts elsewhere find this meshloom, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def _launcher_process(command: list[str], ranks: int, output: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(run(command, ranks))


class _Launcher:
    """A launcher whose ranks say when they are there."""

    def __init__(self, tmp_path: Path, ranks: int, script: str) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        self.said = os.open(fifo, os.O_RDWR)  # open for writing too: no end of file between two ranks
        self.command = write_script(tmp_path, f"fifo = {str(fifo)!r}", TELL, script)
        self.output = tmp_path / "output"
        self.process = CONTEXT.Process(
            target=_launcher_process, args=(self.command, ranks, str(self.output), dict(os.environ))
        )

    def __enter__(self) -> _Launcher:
        self.process.start()
        return self

    def hear(self, count: int) -> None:
        """Wait until that many processes of the ranks have said a byte."""
        for _ in range(count):
            assert self.said in wait([self.said, self.process.sentinel], 60), self.output.read_text()
            os.read(self.said, 1)

    def signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def exit_code(self) -> int | None:
        self.process.join(30)
        return self.process.exitcode

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        os.close(self.said)
        there = left(self.command[-1])
        for process in there:
            process.kill()
        assert not there


SAY_AND_WAIT = """
    if os.fork() == 0:  # a data worker
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(int(os.environ["MESHLOOM_REPORT_FD"]))
    with open(fifo, "w") as stream:
        stream.write("x")
    wait()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: signal.Signals, code: int):
    with _Launcher(tmp_path, 2, SAY_AND_WAIT) as launcher:
        launcher.hear(4)
        launcher.signal(number)
        assert launcher.exit_code() == code
        assert launcher.output.read_text() == f"Stopped by {number.name}; all ranks have ended.\n"


def test_a_signal_while_ranks_are_being_started_ends_those_that_are_there(tmp_path: Path):
    with _Launcher(tmp_path, 8, SAY_AND_WAIT) as launcher:
        launcher.hear(1)
        launcher.signal(signal.SIGINT)
        assert launcher.exit_code() == 130
        assert launcher.output.read_text() == "Stopped by SIGINT; all ranks have ended.\n"


def test_a_second_signal_does_not_wait_for_ranks_that_take_their_time(tmp_path: Path):
    script = "signal.signal(signal.SIGTERM, lambda *_: open(fifo, 'w').write('t'))\nopen(fifo, 'w').write('x')\nwait()"
    with _Launcher(tmp_path, 1, script) as launcher:
        launcher.hear(1)
        launcher.signal(signal.SIGINT)
        launcher.hear(1)  # asked to end, and does not
        launcher.signal(signal.SIGINT)
        assert launcher.exit_code() == 130


def test_a_launcher_killed_with_9_leaves_no_process(tmp_path: Path):
    with _Launcher(tmp_path, 3, SAY_AND_WAIT) as launcher:
        launcher.hear(6)
        guards = [
            child
            for child in psutil.Process(launcher.process.pid).children()
            if "os.killpg" in " ".join(child.cmdline())
        ]
        assert len(guards) == 1
        launcher.signal(signal.SIGKILL)
        assert launcher.exit_code() == -signal.SIGKILL
        assert not psutil.wait_procs(guards, timeout=5)[1]
