"""Whatever ends a rank, one message says why and no process is left."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launch_scripts import JOINED, TELL, left, run, write_script
from machine import machine

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts elsewhere find this meshloom, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def test_ranks_find_their_rank_and_only_rank_0_has_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MESHLOOM_PLAN",
        "MESHLOOM_DEVICES",
    ]
    script = f"""
        import json, os, sys
        print(json.dumps([os.environ[name] for name in {names}]))
        if os.environ["RANK"] != "0":
            print("no end of line", end="", file=sys.stderr)
    """
    assert run(write_script(tmp_path, script), 3) == 0
    out, err = capfd.readouterr()
    lines = [json.dumps([str(rank), str(rank), "3", "3", "127.0.0.1", "dp=3", "cpu"]) for rank in range(3)]
    assert out == lines[0] + "\n"
    assert sorted(err.splitlines()) == [
        f"[rank {rank}] {line}" for rank in (1, 2) for line in (lines[rank], "no end of line")
    ]


def test_threads_of_the_ranks_add_up_to_the_cores(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    machine(monkeypatch, 0, 7)
    command = write_script(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])")
    assert run(command, 2) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run(command, 2) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("3\n5\n", "[rank 1] 3\n[rank 1] 5\n")


def test_a_command_that_does_not_exist_is_one_sentence(capfd: pytest.CaptureFixture[str]):
    assert run(["/no/such/program"], 2) == 1
    assert (
        capfd.readouterr().err
        == "Rank 0 could not be started: [Errno 2] No such file or directory: '/no/such/program'.\n"
    )


def test_the_first_error_is_shown_with_rank_place_and_source_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    body = """
        def body(group, rank):
            if rank == 1:
                raise ValueError("broken batch")
            group.barrier().wait()
        run()
    """
    command = write_script(tmp_path, JOINED, body)
    assert run(command, 2) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("ValueError on rank 1 (dp=1): broken batch\n")  # once, and not meshloom's frames
    assert "PeerLostError" not in err
    lines = err.strip().splitlines()
    number = 1 + (tmp_path / "job.py").read_text().splitlines().index(
        '        raise ValueError("broken batch")'
    )
    assert all(line.startswith(f"  {tmp_path}/job.py:") for line in lines[1:])
    assert lines[-1] == f'  {tmp_path}/job.py:{number}: raise ValueError("broken batch")'
    assert not left(command[-1])


def test_an_error_that_meshloom_explains_has_no_traceback_and_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    script = """
        from meshloom.core.errors import JobError
        from meshloom.launch.failure import report_failure
        import sys
        sys.exit(report_failure(JobError("There is no job in this file.")))
    """
    assert run(write_script(tmp_path, script), 1) == 2
    assert capfd.readouterr().err == "JobError: There is no job in this file.\n"


def test_an_uncaught_error_in_a_loop_of_ones_own_ends_all_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    body = """
        def body(group, rank):
            pass
        world = open_world(Plan.parse(launched_plan()).mesh, timeout_seconds=60)
        group = world.local[0].groups["dp"]
        if group.rank == 1:
            pending = group.all_reduce(torch.ones(3))  # an ordinary exit would wait for it
            raise KeyError("loop")
        pending = [group.all_reduce(torch.ones(3)) for _ in range(2)]
        pending[1].wait()
    """
    command = write_script(tmp_path, JOINED, body)
    assert run(command, 2) == 1
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-2] == "KeyError on rank 1 (dp=1): 'loop'"
    assert 'raise KeyError("loop")' in lines[-1]
    assert not left(command[-1])


def test_a_rank_killed_with_9_is_named_although_others_notice_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    body = """
        def body(group, rank):
            if rank == 1:
                if os.fork() == 0:  # a data worker that does not end when it is asked to
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    while True:
                        time.sleep(60)
                os.kill(os.getpid(), signal.SIGKILL)
            group.barrier().wait()
        run()
    """
    command = write_script(tmp_path, JOINED, body)
    began = time.monotonic()
    assert run(command, 2) == 1
    assert (
        capfd.readouterr().err
        == "Rank 1 (dp=1) was killed by SIGKILL (the system does that when memory runs out) while running code of its own.\n"
    )
    assert not left(command[-1])
    assert time.monotonic() - began < 30


def test_a_rank_that_ends_early_without_an_error_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    body = """
        def body(group, rank):
            if rank == 1:
                os._exit(0)
            group.barrier().wait()
        run()
    """
    assert run(write_script(tmp_path, JOINED, body), 2) == 1
    err = capfd.readouterr().err
    assert err.startswith(
        "Rank 1 (dp=1) ended without an error while rank 0 (dp=0) was still working together with it: rank 0 (dp=0) lost rank 1 (dp=1)"
    )
    assert " in barrier" in err


def test_a_rank_that_ends_before_it_joins_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    command = write_script(tmp_path, TELL, 'if rank == "0":\n    tell(event="joining")\n    wait()')
    assert run(command, 2) == 1
    assert capfd.readouterr().err == "Rank 1 (dp=1) ended before it joined the others, which wait for it.\n"
    assert not left(command[-1])


def test_a_rank_that_exits_with_a_code_alone_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    command = write_script(tmp_path, TELL, 'sys.exit(3) if rank == "1" else wait()')
    assert run(command, 2) == 1
    assert (
        capfd.readouterr().err
        == "Rank 1 (dp=1) ended with exit code 3 while starting, and did not say why.\n"
    )
    assert not left(command[-1])


FAILED = "dict(event='failed', who='rank ' + rank, message='m' + rank, line='', traceback='', exit_code=1)"


def test_the_cause_is_waited_for_when_a_consequence_comes_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"""
        if rank == "0":
            tell(**{FAILED}, kind="PeerLostError", consequence=True)
            open({str(fifo)!r}, "w").close()
        else:
            open({str(fifo)!r}).close()  # rank 0 has spoken
            tell(**{FAILED}, kind="ValueError", consequence=False)
        wait()
    """
    assert run(write_script(tmp_path, TELL, script), 2) == 1
    assert capfd.readouterr().err == "ValueError on rank 1: m1\n"


def test_a_consequence_alone_is_shown_in_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = f"""
        if rank == "0":
            tell(**{FAILED}, kind="PeerLostError", consequence=True)
        wait()
    """
    assert run(write_script(tmp_path, TELL, script), 2) == 1
    assert capfd.readouterr().err == "PeerLostError on rank 0: m0\n"


def test_a_run_closes_what_it_opened(tmp_path: Path):
    """The store in which ranks meet among them: at once, not when the garbage is collected."""
    before = _open_files()
    gc.disable()
    try:
        assert run(write_script(tmp_path, TELL), 2) == 0
        assert run(["/no/such/program"], 2) == 1
        assert _open_files() == before
    finally:
        gc.enable()


def _open_files() -> set[str]:
    return {
        f"{name}: {path.readlink()}"
        for name in os.listdir("/proc/self/fd")
        if (path := Path("/proc/self/fd", name)).is_symlink()
    }


def test_a_rank_that_never_stops_printing_does_not_keep_the_launcher(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The launcher read until there was nothing more to read, which with a fast rank was never."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    endless = f"""
        if rank == "0":
            open({str(fifo)!r}).close()
            sys.exit(3)
        for number in range(1 << 60):
            os.write(1, b"x\\n" * 16_000)
            if number == 10:
                open({str(fifo)!r}, "w").close()
    """
    assert run(write_script(tmp_path, TELL, endless), 2) == 1
    assert capfd.readouterr().err.endswith(
        "Rank 0 (dp=0) ended with exit code 3 while starting, and did not say why.\n"
    )


class _LostTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_ranks_are_ended_although_the_terminal_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What cannot be shown any more is no reason to stop ending ranks, nor for another exit code."""
    command = write_script(tmp_path, TELL, "if rank == '1':\n    print('x')\n    sys.exit(3)\nwait()")
    monkeypatch.setattr(sys, "stderr", _LostTerminal())
    assert run(command, 2) == 1
    assert not left(command[-1])


def test_a_rank_killed_while_it_tells_something_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Half a line is no message; it was read as one."""
    half = """
        if rank == "1":
            os.write(int(os.environ["MESHLOOM_REPORT_FD"]), b'{"event": "fai')
            os.kill(os.getpid(), signal.SIGKILL)
        wait()
    """
    assert run(write_script(tmp_path, TELL, half), 2) == 1
    assert (
        capfd.readouterr().err
        == "Rank 1 (dp=1) was killed by SIGKILL (the system does that when memory runs out) while starting.\n"
    )


def test_a_signal_without_a_name_has_its_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert run(write_script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)"), 1) == 1
    assert (
        capfd.readouterr().err
        == f"Rank 0 (dp=0) was killed by signal {signal.SIGRTMIN + 3} while starting.\n"
    )


def test_a_rank_that_ended_long_ago_is_sent_no_more_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its number may be another program's by then."""
    sent: list[int] = []
    killpg = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (sent.append(group), killpg(group, number)))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    other = f"""
        if rank == "0":
            with open({str(fifo)!r}) as stream:
                first = int(stream.read())
            while os.path.exists(f"/proc/{{first}}"):  # until the launcher has buried it
                time.sleep(0.01)
        else:
            with open({str(fifo)!r}, "w") as stream:
                print(os.getpid(), file=stream)
    """
    assert run(write_script(tmp_path, TELL, other), 2) == 0
    assert len(sent) == len(set(sent)) == 2  # each group once, when its leader ended
