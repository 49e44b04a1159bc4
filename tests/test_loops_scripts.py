"""Loops in the shape of public ones: each computes under every plan what it computes by itself on whole batches, or is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "loop_scripts"
PLANS = ("dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2")
# what the boundary does not allow, and the sentence that says so
REFUSED = {
    ("episodes", "pp=2,microbatches=2"): "A pipeline cuts the inputs of a call",
    ("word_language_model", "pp=2,microbatches=2"): "Say which dim of which input is the batch",
    ("waves", "dp=2,zero=3"): "LBFGS looks at whole parameters",
    ("waves", "pp=2,microbatches=2"): "LBFGS looks at whole parameters",
    ("waves", "tp=2"): "LBFGS looks at whole parameters",  # where it is divided
}
# those of `make test`
QUICK = {("contrast", "tp=2"), ("adversarial", "dp=2,zero=3")}
CELLS = [
    pytest.param(path.stem, plan, marks=() if (path.stem, plan) in QUICK else pytest.mark.slow)
    for path in sorted(SCRIPTS.glob("*.py"))
    for plan in PLANS
]
pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("script", "plan"), CELLS)
def test_a_loop_of_one_s_own_equals_itself(script: str, plan: str, tmp_path: Path):
    command = [sys.executable, "-m", "meshloom", "verify", str(SCRIPTS / f"{script}.py"), "--plan", plan, "--", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    told = done.stdout + done.stderr
    if (sentence := REFUSED.get((script, plan))) and (done.returncode or plan != "tp=2"):
        assert done.returncode == 2 and sentence in told, told
    else:
        assert done.returncode == 0 and "EQUAL: the script computes under" in told, told


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    ["dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=3", "dp=2,zero=1", "dp=2,tp=2,zero=1", "dp=2,pp=2,zero=2"],
)
def test_a_language_model_equals_itself_under_products_of_plans(plan: str, tmp_path: Path):
    test_a_loop_of_one_s_own_equals_itself("small_gpt", plan, tmp_path)


@pytest.mark.slow
def test_a_sum_over_a_share_is_named(tmp_path: Path):
    text = (SCRIPTS / "variational.py").read_text()
    assert "loss = ml.sum(loss_function(" in text
    (tmp_path / "train.py").write_text(text.replace("loss = ml.sum(loss_function(", "loss = (loss_function("))
    command = [sys.executable, "-m", "meshloom", "verify", "train.py", "--plan", "dp=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "DIFFERS" in done.stdout and "ml.sum(loss)" in done.stdout, done.stdout
