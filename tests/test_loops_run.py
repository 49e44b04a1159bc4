"""Scripts with a loop of their own: started, ended, and what they see of ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from processes import on_ranks

from meshloom.cli.main import main
from meshloom.cli.verb_run import execute
from meshloom.core.errors import DeviceError, PeerLostError
from meshloom.core.random import preserved_draws
from meshloom.launch.child_environment import script_environment
from meshloom.launch.environment import (
    begin_script,
    bring_ranks_back,
    is_first_rank,
    is_rank,
    launched_plan,
    launched_rank,
    of_no_rank,
    script_seed,
)
from meshloom.launch.first_of_host import main_first

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1", "MESHLOOM_PLAN": "dp=2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script that is run in this process leaves its program behind; scripts elsewhere find this meshloom."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    yield
    for name in ("beside", "pkg", "pkg.beside"):
        sys.modules.pop(name, None)


def written(directory: Path, text: str) -> str:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


SEES = """
    import json, pickle, random, sys

    class Data:
        pass

    if __name__ == "__main__":
        import beside
        seen = [sys.argv, sys.path[0], __file__, sys.modules["__main__"].Data is pickle.loads(pickle.dumps(Data)), __spec__, beside.there]
        draws = [random.random()]
        if "torch" in sys.modules:  # which the other process need not wait for
            import numpy, torch
            draws += [numpy.random.rand(), torch.rand(1).item()]
        with open(sys.argv[1], "w") as file:
            json.dump([seen, draws], file)
        sys.exit(int(sys.argv[2]))
"""


def test_a_script_sees_what_python_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = written(tmp_path, SEES)
    (tmp_path / "beside.py").write_text("there = True")
    monkeypatch.chdir(tmp_path)
    by_python, by_us = tmp_path / "python.json", tmp_path / "us.json"
    subprocess.run([sys.executable, "train.py", str(by_python), "0"], check=True)
    with preserved_draws():
        assert main(["run", "train.py", "--", str(by_us), "0"]) == 0
    (seen, _), (ours, draws) = json.loads(by_python.read_text()), json.loads(by_us.read_text())
    assert seen[0].pop(1) == str(by_python)
    assert ours[0].pop(1) == str(by_us)
    assert ours == seen and ours[2] == target
    with preserved_draws():
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        assert draws == [random.random(), numpy.random.rand(), torch.rand(1).item()]


@pytest.mark.parametrize(
    ("target", "line"), [("pkg.train", "from pkg.beside import there"), ("pkg/train.py", "from .beside import there")]
)  # fmt: skip
def test_a_module_of_a_package_sees_what_python_shows_it(
    target: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/beside.py").write_text("there = True")
    seen = "[sys.argv[0], sys.path[0], __name__, __package__, __spec__.name, __file__, there]"
    (tmp_path / "pkg/train.py").write_text(
        f"import json, pathlib, sys\n{line}\npathlib.Path(sys.argv[1]).write_text(json.dumps({seen}))"
    )
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-m", "pkg.train", "python.json"], check=True)
    with preserved_draws():
        assert main(["run", target, "--", "us.json"]) == 0
    by_python, by_us = (json.loads(Path(f"{each}.json").read_text()) for each in ("python", "us"))
    assert by_python[3:5] == ["pkg", "pkg.train"] and by_us == by_python


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("raise ValueError('bad')", 1, "ValueError: bad\n  {target}:3: raise ValueError('bad')"),
        ("sys.exit('no data')", 1, "no data"),
        ("sys.exit(7)", 7, ""),
        ("raise KeyboardInterrupt", 130, "meshloom: interrupted"),
        ("meshloom.core.plan.Plan(dp=0)", 2, "PlanError"),
        ("print('done')", 0, ""),
    ],
)
def test_a_script_of_one_process_ends_as_it_says(
    ending: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = written(tmp_path, f"import sys\nimport meshloom.core.plan\n{ending}\n")
    with preserved_draws():
        assert main(["run", target]) == code
    assert capsys.readouterr().err.startswith(told.format(target=target))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "There is no file nowhere.py. Give a script, as in meshloom run train.py"),
        (["."], ". is a directory. Give a script"),
        (["train.py:job"], "train.py:job names a job, and run starts scripts that have a loop of their own. Use meshloom train train.py:job."),
        (["train.py", "--plan", "dp=2,up=3"], "PlanError"),
        (["train.py", "--plan", "dp=2,precision=bf16"], "A loop of one's own takes no precision=bf16 from its plan"),
        (["train.py", "--plan", "dp=2", "--timeout", "-1"], "--timeout -1.0 must be"),
        (["train.py", "--plan", "dp=2", "--devices", "cuda"], "devices=cuda needs 2 GPUs"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_a_sentence_before_ranks_start(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):  # fmt: skip
    written(tmp_path, "raise SystemExit('started')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["run", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_script_that_is_no_job_is_told_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = written(tmp_path, "loop = 1")
    assert main(["train", target, "--plan", "dp=1"]) == 2
    assert f"A script with a loop of its own is started by meshloom run {target}." in capsys.readouterr().err


def test_a_script_finds_nothing_of_ranks_and_what_it_starts_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {**TORCHRUN, "HOME": "/here"})
    assert begin_script()
    assert os.environ.keys() == {"HOME", "MESHLOOM_LAUNCHED"}
    assert is_rank() and launched_plan() == "dp=2" and not is_first_rank()
    here = launched_rank()
    assert here and (here.rank, here.size, here.port) == (1, 2, 29500)
    assert of_no_rank() == {"HOME": "/here"}
    inherited = dict(os.environ)
    bring_ranks_back()
    assert os.environ == {**TORCHRUN, "HOME": "/here"}
    monkeypatch.setattr(os, "environ", inherited)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a data worker, or another program
    assert not begin_script() and not is_rank() and launched_plan() is None and is_first_rank()


def test_the_environment_is_left_alone_where_it_is_asked_for_or_is_of_no_rank(
    monkeypatch: pytest.MonkeyPatch,
):
    kept = {**TORCHRUN, "MESHLOOM_KEEP_RANKS": "1"}
    of_a_batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    incomplete = {"RANK": "1"}
    for environment, draws in ((kept, True), (of_a_batch_script, False), (incomplete, False)):
        monkeypatch.setattr(os, "environ", dict(environment))
        assert begin_script() is draws
        assert os.environ == environment
    ours = {**TORCHRUN, "MESHLOOM_REPORT_FD": "9"}
    monkeypatch.setattr(os, "environ", ours)
    assert not begin_script() and "RANK" not in os.environ  # a command of ours seeds for itself


def test_a_seed_is_a_whole_number(monkeypatch: pytest.MonkeyPatch):
    assert script_seed() == 0
    monkeypatch.setenv("MESHLOOM_SEED", "12")
    assert script_seed() == 12
    monkeypatch.setenv("MESHLOOM_SEED", "x")
    with pytest.raises(
        DeviceError, match="MESHLOOM_SEED='x' of this process's environment must be a whole number"
    ):
        script_seed()


def test_a_rank_sees_one_gpu_or_none():
    def seen(devices: str, **environment: str) -> list[str]:
        return [script_environment(environment, rank, devices)["CUDA_VISIBLE_DEVICES"] for rank in range(2)]

    assert seen("cuda") == ["0", "1"]
    assert seen("cuda", CUDA_VISIBLE_DEVICES="3, GPU-5") == ["3", "GPU-5"]
    assert seen("cpu", CUDA_VISIBLE_DEVICES="3") == ["", ""]
    assert script_environment({"PYTHONHASHSEED": "5"}, 0, "cpu")["PYTHONHASHSEED"] == "5"


def test_one_process_goes_first_alone():
    with main_first():
        assert is_first_rank()
    with pytest.raises(ValueError, match="bad"), main_first():
        raise ValueError("bad")


def _in_order(path: str) -> object:
    seen: list[object] = []
    with main_first():
        seen.append(Path(path).exists())
        Path(path).touch()
    try:
        with main_first():
            raise ValueError("no network")
    except (ValueError, PeerLostError) as error:
        seen.append(str(error))
    with main_first():
        seen.append(is_first_rank())
    return seen


@pytest.mark.processes
def test_the_first_of_a_host_goes_before_the_others_who_end_where_it_fails(tmp_path: Path):
    lost = "rank 0 raised ValueError in `with main_first():`, which this rank was to follow."
    assert on_ranks(_in_order, 2, str(tmp_path / "made")) == [
        [False, "no network", True],
        [True, lost, False],
    ]


RANKS = """
    import json, os, random, subprocess, sys
    import numpy, torch
    from torch.utils.data import DataLoader, Dataset
    import meshloom
    from meshloom.comm.objects import collect
    from meshloom.launch.environment import is_rank, launched_plan
    from meshloom.loops.ranks import ranks

    class Of(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return torch.tensor([index, int(is_rank()), int(launched_plan() is not None), int("RANK" in os.environ)])

    if __name__ == "__main__":
        draws = [random.random(), numpy.random.rand(), torch.rand(1).item(), hash("a")]
        child = "import meshloom.launch.environment as e; print(e.is_rank(), e.launched_plan(), e.report_descriptor())"
        told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip()
        batch = next(iter(DataLoader(Of(), 4, num_workers=1, multiprocessing_context="spawn"))).tolist()
        mine = [draws, [name for name in os.environ if "RANK" in name or "WORLD" in name], told, batch, sys.argv[1:]]
        everyone = ranks().everyone
        with open(f"{sys.argv[1]}{everyone.rank}", "w") as file:
            json.dump(collect(everyone, mine), file)
"""


@pytest.mark.processes
def test_ranks_of_a_script_draw_alike_and_find_nothing_of_ranks(tmp_path: Path):
    out = str(tmp_path / "seen")
    assert main(["run", written(tmp_path, RANKS), "--plan", "dp=2", "--devices", "cpu", "--", out]) == 0
    (one, other), again = (json.loads(Path(f"{out}{rank}").read_text()) for rank in range(2))
    assert [one, other] == again and one == other
    no_rank = [[index, 0, 0, 0] for index in range(4)]
    assert one[1:] == [[], "False None None", no_rank, [out]]


PARTS = """
    import sys
    import meshloom
    from meshloom.loops.ranks import ranks
    everyone = ranks().everyone
    for step in range(3):
        if step == 1 and everyone.rank == 0:
            {how}
        try:
            everyone.barrier().wait()
        except {caught}:
            print("skipped")
"""
WAITED = "train.py:10: everyone.barrier().wait()"

LEFT = "PeerLostError on rank 1 (dp=1): rank 0 (dp=0) has come to its end while this rank waits for it: "


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "caught", "code", "told"),
    [
        ("break", "Exception", 1, (LEFT + "The script has caught that ", "[rank 1] skipped")),
        ("break", "ValueError", 1, (LEFT, f"\n  {WAITED}\n")),
        ("raise ValueError('bad')", "OSError", 1, ("ValueError on rank 0 (dp=0): bad\n  train.py:8: raise ValueError('bad')\nRank 1 (dp=1) waited for it at ", WAITED)),
        ("raise KeyboardInterrupt", "OSError", 130, ("Rank 0 (dp=0) was interrupted.\n  train.py:8: raise KeyboardInterrupt\nRank 1 (dp=1) waited for it at ", WAITED)),
    ],
)  # fmt: skip
def test_ranks_that_part_ways_end_with_the_lines_of_both(
    how: str, caught: str, code: int, told: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):  # fmt: skip
    written(tmp_path, PARTS.format(how=how, caught=caught))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "train.py", "--plan", "dp=2", "--devices", "cpu"]) == code
    err = capfd.readouterr().err
    assert told[0] in err and told[1] in err


@pytest.mark.processes
def test_a_script_that_makes_nothing_parallel_is_not_run_twice_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["run", written(tmp_path, "print('done')"), "--plan", "dp=2", "--devices", "cpu"]) == 2
    told = capfd.readouterr().err
    assert (
        "Each of 2 processes has run all of this script: nothing in it is parallel. Call ml.parallel" in told
    )


@pytest.mark.processes
def test_under_torchrun_too_the_rank_that_waits_says_for_whom(tmp_path: Path):
    written(tmp_path, PARTS.format(how="sys.exit()", caught="ValueError"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # torchrun leaves a directory of logs there
    ended = subprocess.run(
        torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "meshloom: 2 ranks and no plan: dp=2\n" in ended.stderr
    assert LEFT in ended.stderr and f"\n  {WAITED}\n" in ended.stderr


def test_a_program_is_a_module_of_its_own(tmp_path: Path):
    before = sys.modules["__main__"]
    execute(written(tmp_path, "global_of_its_own = 1"), [])
    found = sys.modules["__main__"]
    assert isinstance(found, ModuleType) and found is not before
    assert found.global_of_its_own == 1
