"""Ranks find their devices and each other; whatever ends a run, one message says why and no process is left."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import CONTEXT, on_ranks

from meshloom.comm.turns import run_in_steps
from meshloom.comm.values import collect
from meshloom.errors import DataError, DeviceError, PeerLostError, PlanError
from meshloom.launch import (
    _own_line,
    _seat,
    choose_devices,
    default_ranks,
    is_rank,
    launched_plan,
    open_world,
    report_failure,
    run_ranks,
)
from meshloom.mesh import Mesh, Place

pytestmark = pytest.mark.processes
CPU = torch.device("cpu")


def _machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


# --- The choice.


@pytest.mark.parametrize(
    ("ranks", "devices", "gpus", "cores", "expected"),
    [
        (4, "auto", 4, 2, "cuda: 4 ranks, one GPU each (4 GPUs are visible)"),
        (1, "auto", 1, 2, "cuda: 1 rank, one GPU each (1 GPU is visible)"),
        (4, "auto", 1, 8, "cpu: 4 ranks as processes on 8 cores, 2 threads each (1 GPU is visible)"),
        (2, "auto", 0, 2, "cpu: 2 ranks as processes on 2 cores, 1 thread each (no GPU is visible)"),
        (1, "auto", 0, 2, "cpu: 1 rank as process on 2 cores, 2 threads each (no GPU is visible)"),
        (4, "auto", 0, 2, "simulated: 4 ranks in one process on 2 cores (no GPU is visible, and 4 ranks are more than 2 cores)"),
        (4, "cpu", 4, 2, "cpu: 4 ranks as processes on 2 cores, 1 thread each (asked for)"),
        (2, "cuda", 2, 1, "cuda: 2 ranks, one GPU each (asked for)"),
        (2, "simulated", 2, 8, "simulated: 2 ranks in one process on 8 cores (asked for)"),
        (4, "simulated:cuda", 2, 8, "simulated: 4 ranks in one process on 2 GPUs (asked for)"),
    ],
)
def test_choice_of_devices_and_its_reason(monkeypatch: pytest.MonkeyPatch, ranks: int, devices: str, gpus: int, cores: int, expected: str):
    _machine(monkeypatch, gpus, cores)
    assert choose_devices(Mesh(dp=ranks), devices) == (expected.partition(":")[0], expected)


@pytest.mark.parametrize(
    ("devices", "gpus", "message"),
    [
        ("cuda", 0, "devices=cuda needs 4 GPUs, one for each rank, and no GPU is visible. Use devices=cpu or devices=simulated."),
        ("cuda", 2, "and 2 GPUs are visible. Use devices=cpu or devices=simulated, or a plan of at most 2 ranks."),
        ("simulated:cuda", 0, "devices=simulated:cuda needs a GPU, and none is visible. Use devices=simulated."),
        ("gpu", 4, "devices=gpu is not known. Use auto, cuda, cpu, simulated or simulated:cuda."),
    ],
)
def test_devices_that_are_not_there_are_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch, devices: str, gpus: int, message: str):
    _machine(monkeypatch, gpus, 2)
    with pytest.raises(DeviceError) as error:
        choose_devices(Mesh(dp=4), devices)
    assert message in str(error.value)


def test_threads_that_the_user_has_set_are_kept(monkeypatch: pytest.MonkeyPatch):
    _machine(monkeypatch, 0, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "3 threads each" in choose_devices(Mesh(dp=2))[1]


def test_default_number_of_ranks(monkeypatch: pytest.MonkeyPatch):
    _machine(monkeypatch, 3, 8)
    assert (default_ranks(), default_ranks("cpu"), default_ranks("cuda")) == (3, 1, 3)
    _machine(monkeypatch, 0, 8)
    assert default_ranks() == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert default_ranks() == 5


# --- A process's seat.

SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "42"}


def test_seat_under_torchrun_and_under_srun():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    seat = _seat({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert seat
    assert (seat.rank, seat.size, seat.local_rank, seat.local_size, seat.address, seat.port, seat.hosts_store) == (5, 8, 1, 4, "head", 29500, False)
    bare = _seat({**torchrun, "RANK": "0"})
    assert bare and bare.hosts_store

    srun = {**SRUN, "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    seat = _seat(srun)
    assert seat
    assert (seat.rank, seat.size, seat.local_rank, seat.local_size, seat.address, seat.hosts_store) == (5, 8, 1, 4, "gpu07", False)
    other = _seat({**srun, "SLURM_PROCID": "0"})
    assert other and other.hosts_store and (other.address, other.port) == (seat.address, seat.port)


@pytest.mark.parametrize("environment", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_shell_and_a_batch_script_are_no_rank(environment: dict[str, str]):
    assert _seat(environment) is None


def test_half_an_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DeviceError, match="RANK and WORLD_SIZE are set, but MASTER_ADDR is not. Start with torchrun"):
        open_world(Mesh(dp=2))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(DeviceError, match="not a number"):
        open_world(Mesh(dp=2))


@pytest.mark.parametrize(("started", "planned"), [(2, 4), (4, 2), (1, 2)])
def test_a_mesh_of_another_size_than_the_processes_is_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch, started: int, planned: int):
    for name, value in {"RANK": "0", "WORLD_SIZE": str(started), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert is_rank()
    with pytest.raises(PlanError) as error:
        open_world(Mesh(dp=planned))
    assert f"The plan needs {planned} ranks (dp={planned}), but {started} process" in str(error.value)
    assert f"Start {planned} (torchrun --nproc-per-node {planned} on one machine), or use a plan of {started}, like dp={started}." in str(error.value)


# --- Worlds within this process.


def test_a_world_of_one_needs_no_process_group():
    with open_world(Mesh()) as world:
        assert (world.kind, world.main, len(world.local)) == ("cuda" if torch.cuda.is_available() else "cpu", True, 1)
        tensor = torch.ones(3)
        world.local[0].groups["dp"].all_reduce(tensor).wait()
        assert torch.equal(tensor, torch.ones(3))
        assert not dist.is_initialized()
        assert world.memory_bytes() > 2**20


def test_simulated_ranks_share_a_process(monkeypatch: pytest.MonkeyPatch):
    _machine(monkeypatch, 0, 2)
    with open_world(Mesh(dp=3), "simulated") as world:
        assert (world.kind, world.main) == ("simulated", True)
        assert world.why == f"simulated: 3 ranks in this process on {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} (asked for)"
        assert [(seat.rank, seat.place, seat.device) for seat in world.local] == [(rank, Place(dp=rank), CPU) for rank in range(3)]
        assert run_in_steps([collect(seat.world, seat.rank) for seat in world.local]) == [[0, 1, 2]] * 3
        assert run_in_steps([collect(seat.statistics, seat.rank) for seat in world.local]) == [[0, 1, 2]] * 3
        assert world.local[0].statistics.counts["all_gather"].calls == 2 and not world.local[0].groups["dp"].counts
    with open_world(Mesh(dp=2)) as world:
        assert "this process was not started as one of 2" in world.why


def test_simulated_groups_along_each_axis_hold_their_own_ranks():
    with open_world(Mesh(dp=2, pp=2, tp=2), "simulated") as world:
        for axis in ("dp", "pp", "tp"):
            seen = run_in_steps([collect(seat.groups[axis], seat.rank) for seat in world.local])
            assert [tuple(ranks) for ranks in seen] == [world.mesh.group_of(axis, rank) for rank in range(8)]


def test_simulated_ranks_go_round_the_gpus(monkeypatch: pytest.MonkeyPatch):
    _machine(monkeypatch, 2, 2)
    with open_world(Mesh(dp=3), "simulated:cuda") as world:
        assert [str(seat.device) for seat in world.local] == ["cuda:0", "cuda:1", "cuda:0"]
        assert world.why == "simulated: 3 ranks in this process on 2 GPUs (asked for)"


# --- Worlds of processes.


def _two_worlds() -> object:
    results: list[object] = []
    for sizes in ({"dp": 4}, {"dp": 2, "tp": 2}):
        with open_world(Mesh(**sizes), "cpu", timeout_seconds=30) as world:
            (seat,) = world.local
            mine = [run_in_steps([collect(group, seat.rank)])[0] for group in (*seat.groups.values(), seat.statistics, seat.world)]
            results.append((seat.rank, str(seat.place), list(seat.groups), mine, world.kind, world.main, world.why))
        results.append(dist.is_initialized())
    return results


def test_processes_form_the_groups_of_the_mesh_and_can_do_so_again():
    cores = len(os.sched_getaffinity(0))
    why = f"cpu: 4 ranks as processes on {cores} cores, 1 thread each (asked for)"
    for rank, results in enumerate(on_ranks(_two_worlds, 4)):
        along = {axis: list(Mesh(dp=2, tp=2).group_of(axis, rank)) for axis in ("dp", "tp")}
        everyone = [0, 1, 2, 3]
        assert results == [
            (rank, f"dp={rank}", ["dp"], [everyone] * 3, "cpu", rank == 0, why),
            False,
            (rank, str(Mesh(dp=2, tp=2).place(rank)), ["dp", "tp"], [along["dp"], along["tp"], along["dp"], everyone], "cpu", rank == 0, why),
            False,
        ]


def _in_an_initialized_process() -> object:
    dist.init_process_group("gloo")
    with open_world(Mesh(dp=2), timeout_seconds=30) as world:
        seen = run_in_steps([collect(world.local[0].world, world.local[0].rank)])[0]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return seen, tensor.item()


def test_a_process_group_of_the_users_own_is_used_and_left_alone():
    assert on_ranks(_in_an_initialized_process, 2) == [([0, 1], 2.0)] * 2


def _one_is_done_early() -> object:
    world = open_world(Mesh(dp=2), timeout_seconds=30)
    try:
        if world.local[0].rank == 0:
            run_in_steps([collect(world.local[0].world, "still here")])
    except PeerLostError as error:
        return str(error)
    finally:
        world.close()
    return None


def test_a_rank_that_is_done_early_does_not_keep_the_others_waiting():
    waiting, done = on_ranks(_one_is_done_early, 2)
    assert done is None
    assert waiting.startswith("rank 0 (dp=0) lost rank 1 (dp=1)")


def _simulated_in_a_rank() -> str:
    with pytest.raises(DeviceError) as error:
        open_world(Mesh(dp=2), "simulated")
    return str(error.value)


def test_simulating_in_each_of_several_processes_is_refused():
    text = "devices=simulated keeps all ranks in one process, but 2 processes were started. Start one, or use devices=cpu."
    assert on_ranks(_simulated_in_a_rank, 2) == [text] * 2


# --- What a rank says when it fails.


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

    assert _own_line(_caught(through_torch)).endswith("raise ValueError(text)  # the user's line")


def test_the_users_own_line_comes_from_the_cause():
    def wrapped() -> None:
        try:
            _fail_deep("boom")
        except ValueError as error:
            raise DataError("The data cannot be read.") from error

    assert "the user's line" in _own_line(_caught(wrapped))


class _Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise KeyError("no such sample")  # in a data worker


def test_the_users_own_line_in_a_data_worker_is_found():
    loader = torch.utils.data.DataLoader(_Broken(), num_workers=1)
    assert "# in a data worker" in _own_line(_caught(lambda: list(loader)))
    gc.collect()  # the traceback holds the iterator, which holds the worker


def test_an_error_without_a_users_line_has_none():
    assert _own_line(PlanError("dp=0 must be 1 or more.")) == ""


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
    assert line.startswith("  ") and "test_launch.py:" in line and line.endswith("# the user's line")


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


# --- The launcher. Scripts that need no torch start in a fraction of the time.

JOINED = """
    import os, signal, sys, time
    import torch
    from meshloom.comm.turns import run_in_steps
    from meshloom.errors import DataError
    from meshloom.launch import launched_plan, leave, open_world, report_failure
    from meshloom.plan import Plan

    def main():
        with open_world(Plan.parse(launched_plan()).mesh, timeout_seconds=60) as world:
            seat = world.local[0]
            group, rank = seat.groups["dp"], seat.rank
            group.barrier().wait()
            body(group, rank)

    def run():
        try:
            main()
        except Exception as error:
            leave(report_failure(error))
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts elsewhere find this meshloom, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def _script(tmp_path: Path, *parts: str) -> list[str]:
    path = tmp_path / "job.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return [sys.executable, str(path)]


def _run(command: list[str], ranks: int) -> int:
    return run_ranks(command, Mesh(dp=ranks), "cpu", f"dp={ranks}")


def test_ranks_find_their_seat_and_only_rank_0_has_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MESHLOOM_PLAN", "MESHLOOM_DEVICES"]
    script = f"""
        import json, os, sys
        print(json.dumps([os.environ[name] for name in {names}]))
        if os.environ["RANK"] != "0":
            print("no end of line", end="", file=sys.stderr)
    """
    assert _run(_script(tmp_path, script), 3) == 0
    out, err = capfd.readouterr()
    seats = [json.dumps([str(rank), str(rank), "3", "3", "127.0.0.1", "dp=3", "cpu"]) for rank in range(3)]
    assert out == seats[0] + "\n"
    assert sorted(err.splitlines()) == [f"[rank {rank}] {line}" for rank in (1, 2) for line in (seats[rank], "no end of line")]


def test_threads_of_the_ranks_add_up_to_the_cores(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    _machine(monkeypatch, 0, 7)
    command = _script(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])")
    assert _run(command, 2) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _run(command, 2) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("3\n5\n", "[rank 1] 3\n[rank 1] 5\n")


def test_a_command_that_does_not_exist_is_one_sentence(capfd: pytest.CaptureFixture[str]):
    assert _run(["/no/such/program"], 2) == 1
    assert capfd.readouterr().err == "Rank 0 could not be started: [Errno 2] No such file or directory: '/no/such/program'.\n"


def _left(script: str) -> list[psutil.Process]:
    """Processes of `script`, forks included, that do not end within seconds."""
    found = [process for process in psutil.process_iter(["cmdline"]) if script in (process.info["cmdline"] or ())]
    return [process for process in psutil.wait_procs(found, timeout=5)[1] if process.status() != psutil.STATUS_ZOMBIE]


def test_the_first_error_is_shown_with_rank_place_and_source_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    body = """
        def body(group, rank):
            if rank == 1:
                raise ValueError("broken batch")
            group.barrier().wait()
        run()
    """
    command = _script(tmp_path, JOINED, body)
    assert _run(command, 2) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("Traceback (most recent call last):")
    assert "PeerLostError" not in err
    lines = err.strip().splitlines()
    number = 1 + (tmp_path / "job.py").read_text().splitlines().index('        raise ValueError("broken batch")')
    assert lines[-2:] == ["ValueError on rank 1 (dp=1): broken batch", f'  {tmp_path}/job.py:{number}: raise ValueError("broken batch")']
    assert not _left(command[-1])


def test_an_error_that_meshloom_explains_has_no_traceback_and_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = """
        from meshloom.errors import JobError
        from meshloom.launch import report_failure
        import sys
        sys.exit(report_failure(JobError("There is no job in this file.")))
    """
    assert _run(_script(tmp_path, script), 1) == 2
    assert capfd.readouterr().err == "JobError: There is no job in this file.\n"


def test_an_uncaught_error_in_a_loop_of_ones_own_ends_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
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
    command = _script(tmp_path, JOINED, body)
    assert _run(command, 2) == 1
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-2] == "KeyError on rank 1 (dp=1): 'loop'"
    assert 'raise KeyError("loop")' in lines[-1]
    assert not _left(command[-1])


def test_a_rank_killed_with_9_is_named_although_others_notice_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
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
    command = _script(tmp_path, JOINED, body)
    began = time.monotonic()
    assert _run(command, 2) == 1
    assert capfd.readouterr().err == "Rank 1 (dp=1) was killed by SIGKILL (the system does that when memory runs out).\n"
    assert not _left(command[-1])
    assert time.monotonic() - began < 30


def test_a_rank_that_ends_early_without_an_error_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    body = """
        def body(group, rank):
            if rank == 1:
                os._exit(0)
            group.barrier().wait()
        run()
    """
    assert _run(_script(tmp_path, JOINED, body), 2) == 1
    err = capfd.readouterr().err
    assert err.startswith(
        "Rank 1 (dp=1) ended without an error while rank 0 (dp=0) was still working together with it: rank 0 (dp=0) lost rank 1 (dp=1) in barrier: "
    )


TELL = """
    import os, signal, sys, time
    rank = os.environ["RANK"]

    def tell(**event):
        import json
        os.write(int(os.environ["MESHLOOM_REPORT_FD"]), json.dumps(event).encode() + b"\\n")

    def wait():
        while True:
            time.sleep(60)
"""


def test_a_rank_that_ends_before_it_joins_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    command = _script(tmp_path, TELL, 'if rank == "0":\n    tell(event="joining")\n    wait()')
    assert _run(command, 2) == 1
    assert capfd.readouterr().err == "Rank 1 (dp=1) ended before it joined the others, which wait for it.\n"
    assert not _left(command[-1])


def test_a_rank_that_exits_with_a_code_alone_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    command = _script(tmp_path, TELL, 'sys.exit(3) if rank == "1" else wait()')
    assert _run(command, 2) == 1
    assert capfd.readouterr().err == "Rank 1 (dp=1) ended with exit code 3, and did not say why.\n"
    assert not _left(command[-1])


FAILED = "dict(event='failed', who='rank ' + rank, message='m' + rank, line='', traceback='', exit_code=1)"


def test_the_cause_is_waited_for_when_a_consequence_comes_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
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
    assert _run(_script(tmp_path, TELL, script), 2) == 1
    assert capfd.readouterr().err == "ValueError on rank 1: m1\n"


def test_a_consequence_alone_is_shown_in_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = f"""
        if rank == "0":
            tell(**{FAILED}, kind="PeerLostError", consequence=True)
        wait()
    """
    assert _run(_script(tmp_path, TELL, script), 2) == 1
    assert capfd.readouterr().err == "PeerLostError on rank 0: m0\n"


# --- Signals to the launcher. It runs in a process of its own.


def _launcher_process(command: list[str], ranks: int, output: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(_run(command, ranks))


class _Launcher:
    """A launcher whose ranks say when they are there."""

    def __init__(self, tmp_path: Path, ranks: int, script: str) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        self.said = os.open(fifo, os.O_RDWR)  # open for writing too: no end of file between two ranks
        self.command = _script(tmp_path, f"fifo = {str(fifo)!r}", TELL, script)
        self.output = tmp_path / "output"
        self.process = CONTEXT.Process(target=_launcher_process, args=(self.command, ranks, str(self.output), dict(os.environ)))

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
        left = _left(self.command[-1])
        for process in left:
            process.kill()
        assert not left


SAY_AND_WAIT = """
    if os.fork() == 0:  # a data worker
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(int(os.environ["MESHLOOM_REPORT_FD"]))
    with open(fifo, "w") as stream:
        stream.write("x")
    wait()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
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
        guards = [child for child in psutil.Process(launcher.process.pid).children() if "os.killpg" in " ".join(child.cmdline())]
        assert len(guards) == 1
        launcher.signal(signal.SIGKILL)
        assert launcher.exit_code() == -signal.SIGKILL
        assert not psutil.wait_procs(guards, timeout=5)[1]


def test_a_rank_whose_launcher_is_gone_ends_when_it_tells_something():
    read, write = os.pipe()
    os.close(read)
    code = "import os\nfrom meshloom.launch import _tell\n_tell({'event': 'joining'})\nprint('still here')"
    environment = {**os.environ, "MESHLOOM_REPORT_FD": str(write)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, pass_fds=[write], start_new_session=True, capture_output=True, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_nothing_of_a_launch_is_in_an_ordinary_environment():
    assert launched_plan() is None
    assert not is_rank()
