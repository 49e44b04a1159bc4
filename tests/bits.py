"""Whether this tree trains the same bits as another one: `make bits AGAINST=REV`.

REV is built in a worktree. Both trees run the same jobs (`bits_jobs.py`) under twelve plans, ten steps each, in float64 and in float32, in one run: the same
torch, one thread. Weights and the optimizer's state after every step are compared bit for bit. A difference is named by its plan, dtype, first step and
first tensor, and is exit code 1. Of other machines other bits are expected, so no file holds them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.earlier_tree import THIS, Tree, earlier_tree
from tests.golden.exact_runs import tensors_of

JOBS = Path(__file__).with_name("bits_jobs.py")
DTYPES = ("float64", "float32")


@dataclass(frozen=True, kw_only=True)
class Case:
    """job: without its dtype. devices: cpu: of processes."""

    job: str
    plan: str
    devices: str = "simulated"

    def __str__(self) -> str:
        return f"{self.job} under {self.plan} ({self.devices})"


CASES = (
    Case(job="gpt", plan="dp=2,keyed_draws=true", devices="cpu"),
    Case(job="gpt", plan="tp=2", devices="cpu"),
    Case(job="gpt", plan="pp=2,microbatches=2,schedule=zb-h1", devices="cpu"),
    Case(job="mlp", plan="dp=2,compress=powersgd:2", devices="cpu"),
    Case(job="gpt", plan="dp=2,pp=2,tp=2,microbatches=2,zero=1"),
    Case(job="gpt", plan="pp=2,tp=2,microbatches=3,recompute=selective"),
    Case(job="gpt", plan="dp=2,tp=2,zero=3"),
    Case(job="cnn", plan="dp=3,sync_batch_norm=true"),
    Case(job="cnn", plan="dp=2,pp=2,microbatches=2,schedule=zb-v"),
    Case(job="mlp", plan="dp=4,exchange=server,servers=2"),
    Case(job="mlp", plan="dp=3,exchange=ring,shares=3+2+1,zero=2"),
    Case(job="mlp", plan="dp=4,exchange=diloco,local_steps=2"),
)


def run(tree: Tree, cases: Sequence[Case], dtypes: Sequence[str], out: Path) -> None:
    """Train every case with the tree's package: step by step, checkpoints of case `number` in float64 lie in `out`/`number`/float64. Raises
    `SystemExit` if one fails."""
    simulated: list[tuple[str, str, str]] = []
    for number, case in enumerate(cases):
        for dtype in dtypes:
            directory = out / str(number) / dtype
            if case.devices == "simulated":
                simulated.append((f"{case.job}_{dtype}", case.plan, str(directory)))
            else:
                target = f"{JOBS}:{case.job}_{dtype}"
                words = [
                    "train",
                    target,
                    "--plan",
                    case.plan,
                    "--devices",
                    case.devices,
                    "--out",
                    str(directory),
                ]
                _finish(tree, ["-m", "meshloom", *words], str(case))
    if simulated:
        _finish(
            tree, [str(Path(__file__).with_name("bits_runs.py")), json.dumps(simulated)], "simulated ranks"
        )


def _finish(tree: Tree, words: Sequence[str], what: str) -> None:
    with tree.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            said, _ = process.communicate()
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"{tree.name}, {what}: exit code {process.returncode}\n{said.decode()}")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first one of a run. tensor: by name. why: of what kind."""

    step: int
    tensor: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.tensor}: {self.why}"


def first_difference(one: Path, other: Path) -> Difference | None:
    """Between two directories of checkpoints."""
    for mine, theirs in zip_longest(sorted(one.glob("step-*")), sorted(other.glob("step-*"))):
        step = int((mine or theirs).name.removeprefix("step-"))
        if mine is None or theirs is None or mine.name != theirs.name:
            return Difference(step=step, tensor="all", why=f"{len(list(one.glob('step-*')))} checkpoints, and {len(list(other.glob('step-*')))}")  # fmt: skip
        for name, why in _different(tensors_of(mine), tensors_of(theirs)):
            return Difference(step=step, tensor=name, why=why)
    return None


def _different(one: dict[str, Tensor], other: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield name, "only one of them has it"
        elif (one[name].dtype, one[name].shape) != (other[name].dtype, other[name].shape):
            yield (
                name,
                f"{one[name].dtype} {list(one[name].shape)}, and {other[name].dtype} {list(other[name].shape)}",
            )
        elif _bits(one[name]) != _bits(other[name]):
            apart = int((one[name] != other[name]).sum())
            error = float((one[name].double() - other[name].double()).abs().max())
            yield name, f"{apart} of {one[name].numel()} elements differ, by up to {error:.1e}"


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def compare(
    one: Tree, other: Tree, out: Path, cases: Sequence[Case] = CASES, dtypes: Sequence[str] = DTYPES
) -> int:
    """Run both trees, which write below `out`, and print a table; the number of runs that differ."""
    different = 0
    for tree, name in ((one, "one"), (other, "other")):
        print(f"running {len(cases)} plans with {tree.name}", flush=True)
        run(tree, cases, dtypes, out / name)
    print(f"torch {torch.__version__}, one thread, {one.name} against {other.name}")
    for number, case in enumerate(cases):
        for dtype in dtypes:
            places = [out / name / str(number) / dtype for name in ("one", "other")]
            steps = len(list(places[0].glob("step-*")))
            found = first_difference(*places)
            different += found is not None
            print(
                f"{dtype}  {case!s:62} {f'DIFFERS: {found}' if found else f'the same bits in {steps} steps'}"
            )
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="REV", required=True, help="a revision of this repository")
    said = parser.parse_args()
    with earlier_tree(said.against) as other:
        return 1 if compare(THIS, other, other.path.parent) else 0  # it goes with the tree


if __name__ == "__main__":
    sys.exit(main())
