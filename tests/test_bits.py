"""The comparison of two trees bit for bit: what is the same, what is not, and that nothing is left of the other tree."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.earlier_tree import ROOT, THIS, Tree, earlier_tree
from tests.bits import CASES, Case, compare, first_difference, run

in_a_repository = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="an earlier tree is one of a git repository"
)


@pytest.mark.processes
def test_two_runs_give_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(THIS, THIS, tmp_path, [CASES[0], CASES[10]], ["float32"]) == 0
    assert capsys.readouterr().out.count("the same bits in 10 steps") == 2


@pytest.mark.processes
@pytest.mark.slow
def test_a_tree_that_computes_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one, and its Python starts with another default of AdamW."""
    (tmp_path / "meshloom").symlink_to(ROOT / "meshloom")
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n"
        "defaults = list(torch.optim.AdamW.__init__.__defaults__)\n"
        "torch.optim.AdamW.__init__.__defaults__ = tuple(1.5e-8 if each == 1e-8 else each for each in defaults)\n"
    )
    cases = [Case(job="cnn", plan="dp=2"), Case(job="mlp", plan="dp=2")]
    assert compare(THIS, Tree(name="the other", path=tmp_path), tmp_path / "runs", cases, ["float64"]) == 1
    same, other = capsys.readouterr().out.splitlines()[-2:]
    assert same.endswith("the same bits in 10 steps")
    assert (
        other.startswith("float64  mlp under dp=2 (simulated)") and "DIFFERS: step 1, first.bias: " in other
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", ["dp=2,keyed_draws=true", pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow)]
)
def test_simulated_ranks_give_the_bits_of_processes(plan: str, tmp_path: Path) -> None:
    """Of float32, which rounds: sums are made in one order."""
    cases = [Case(job="gpt", plan=plan, devices=devices) for devices in ("simulated", "cpu")]
    run(THIS, cases, ["float32"], tmp_path)
    assert len(list((tmp_path / "0/float32").glob("step-*"))) == 10
    assert first_difference(tmp_path / "0/float32", tmp_path / "1/float32") is None


def checkpoints(directory: Path) -> Path:
    for step in (1, 2, 10):
        path = directory / f"step-{step:08}"
        path.mkdir(parents=True)
        save_file({"b": torch.ones(3), "a": torch.tensor([0.0, float("nan")])}, path / "model.safetensors")
        save_file({"optimizer/a/exp_avg[0:2]": torch.zeros(2)}, path / "state-00000-of-00001.safetensors")
    return directory


def test_the_first_step_and_tensor_that_differ_are_named(tmp_path: Path) -> None:
    one, other = checkpoints(tmp_path / "one"), checkpoints(tmp_path / "other")
    assert first_difference(one, other) is None
    for step, file, name, value in [
        (10, "model.safetensors", "a", torch.tensor([-0.0, float("nan")])),  # equal to 0.0, and other bits
        (2, "state-00000-of-00001.safetensors", "optimizer/a/exp_avg[0:2]", torch.tensor([0.0, 0.5])),
        (1, "model.safetensors", "b", torch.ones(4)),
    ]:
        path = other / f"step-{step:08}" / file
        save_file(load_file(path) | {name: value}, path)
        found = first_difference(one, other)
        assert found is not None
        assert (found.step, found.tensor) == (step, name.removeprefix("optimizer/").removesuffix("[0:2]"))
    shutil.rmtree(other / "step-00000001")
    found = first_difference(one, other)
    assert found is not None and str(found) == "step 1, all: 3 checkpoints, and 2"


def worktrees() -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True
    ).stdout


@in_a_repository
@pytest.mark.processes
@pytest.mark.slow
def test_another_revision_is_there_while_it_is_needed(tmp_path: Path) -> None:
    with earlier_tree("HEAD", compiled=False) as tree:
        assert (tree.path / "meshloom/__init__.py").exists() and str(tree.path) in worktrees()
        asked = tree.start(["-c", "import meshloom; print(meshloom.__file__)"], stdout=subprocess.PIPE)
        assert asked.communicate()[0].decode().strip() == str(tree.path / "meshloom/__init__.py")
    assert not tree.path.parent.exists() and str(tree.path) not in worktrees()
    with pytest.raises(SystemExit, match="no-such-revision"), earlier_tree("no-such-revision"):
        pass


@in_a_repository
@pytest.mark.processes
@pytest.mark.slow
def test_steps_of_two_trees_are_timed_in_turns() -> None:
    words = ["--against", "HEAD", "--mode", "small", "--rounds", "2", "--steps", "1", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "benchmarks/step/main.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    one, other = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (one["tree"], other["tree"], one["ratio of"]) == ("this tree", "HEAD", "cpu")
    assert one["ratio"] == one["cpu"]["median"] / other["cpu"]["median"] > 0
    assert all(each["cpu"]["minimum"] > 0 and each["seconds"]["minimum"] > 0 for each in (one, other))


_HOLDS = """
from benchmarks.earlier_tree import earlier_tree
with earlier_tree("HEAD", compiled=False) as tree:
    child = tree.start(["-c", "import time; time.sleep(600)"])
    print(tree.path, child.pid, flush=True)
    child.wait()
"""


@in_a_repository
@pytest.mark.processes
@pytest.mark.slow
def test_nothing_is_left_of_it_when_who_needs_it_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path, child = holder.stdout.readline().split()
        assert Path(path).exists()
        holder.send_signal(signal.SIGKILL)
        # the pipe ends with the child, and the worktree goes with the process that waited for that
        holder.stdout.read()
    while Path(path).parent.exists() or path in worktrees():
        os.sched_yield()
    assert not Path("/proc", child).exists() or "Z" in Path("/proc", child, "stat").read_text()
