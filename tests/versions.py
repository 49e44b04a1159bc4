"""Tries a wheel with versions of Python and torch: each pair in a fresh environment, where a job is trained, verified and
type-checked (tests/installing.py) and a small set of tests runs; a table says what came of it.

    python tests/versions.py dist/meshloom-*.whl [--pythons python3.11 python3.12] [--torch 2.11.0 2.13.0] [--cuda]

Interpreters are looked for on PATH. Torch is the newest of each of its versions from 2.11 on that pip finds, as far as pip gives a
build for CPUs alone: one that brings CUDA's libraries takes gigabytes, and is tried with --cuda only. Where CPU builds are is
a matter of pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). Exit code 1 where a pair fails or none was tried.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.installing import ROOT, limits_without, make_environment, try_installed

PYTHONS = ["python3.11", "python3.12", "python3.13"]
OLDEST = Version("2.11")
TESTS = ["test_plan.py", "test_schedule.py", "test_checkpoint.py", "test_trainer.py", "test_program.py"]
NEEDED = ["pytest", "pytest-timeout", "hypothesis", "psutil", "expecttest", "scikit-learn"]
CUDA = ("nvidia-", "cuda-")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one pair. result: passed, failed, or not tried; why: in a few words."""

    python: str
    torch: str
    result: str
    why: str
    seconds: float = 0.0


def version_of(interpreter: str) -> str | None:
    """Its version, or None if there is none that runs."""
    found = shutil.which(interpreter)
    if found is None:
        return None
    words = [found, "-c", "import sys; print('.'.join(map(str, sys.version_info[:3])))"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def newest_of_each(versions: list[str]) -> list[str]:
    """The newest of each second number from 2.11 on; a CPU build counts as newer than the same without a mark.

    >>> newest_of_each(["2.13.0", "2.13.0+cpu", "2.12.0", "2.12.1", "2.10.0"])
    ['2.12.1', '2.13.0+cpu']
    """
    newest: dict[tuple[int, ...], Version] = {}
    for each in map(Version, versions):
        if each >= OLDEST and not each.is_prerelease:
            newest[each.release[:2]] = max(each, newest.get(each.release[:2], each))
    return [str(newest[key]) for key in sorted(newest)]


def torches_for(python: Path) -> list[str]:
    """Those that pip finds for this interpreter."""
    done = subprocess.run([python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    return newest_of_each(listed[1].split(", ")) if listed else []


def obstacle(python: Path, torch: str) -> str:
    """Why this build is not tried: pip finds none, or it brings CUDA's libraries; empty if nothing is against it."""
    words = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]  # fmt: skip
    done = subprocess.run([*words, "--report", "-", f"torch=={torch}"], capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return errors[-1].removeprefix("ERROR: ") if errors else "pip finds no build"
    (found,) = json.loads(done.stdout)["install"]
    needs = [Requirement(each) for each in found["metadata"].get("requires_dist", [])]
    marked = [each for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    brought = [each.name for each in marked if each.name.startswith(CUDA)]
    return f"a CUDA build ({len(brought)} packages of CUDA), no CPU build was found" if brought else ""


def run_tests(python: Path, directory: Path) -> str:
    """The last line of pytest, which sees a copy of the tests and the installed package alone. Raises `AssertionError`."""
    limits = limits_without("torch", directory)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *limits, *NEEDED], check=True)
    shutil.copytree(ROOT / "tests", directory / "tests")
    shutil.copy(ROOT / "pyproject.toml", directory)
    # a version may deprecate what another one has not yet replaced
    words = [python, "-m", "pytest", "--quiet", "-m", "not processes and not slow and not long and not browser", "--override-ini", "filterwarnings=default"]  # fmt: skip
    files = [f"tests/{name}" for name in TESTS]
    done = subprocess.run([*words, *files], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    counts = re.findall(r"\d+ (?:passed|failed|skipped)", done.stdout) or [
        done.stdout.strip().splitlines()[-1]
    ]
    return ", ".join(counts)


def try_pair(wheel: Path, interpreter: str, python: str, torch: str, *, cuda: bool) -> Outcome:
    """One pair in a directory of its own, which is removed."""
    begun = time.monotonic()

    def outcome(result: str, why: str) -> Outcome:
        seconds = time.monotonic() - begun
        print(f"python {python}, torch {torch}: {result}, {why}", flush=True)
        return Outcome(python=python, torch=torch, result=result, why=why, seconds=seconds)

    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        environment = make_environment(directory, interpreter)
        if not cuda and (why := obstacle(environment, torch)):
            return outcome("not tried", why)
        try:
            try_installed(wheel, directory, compiled=True, interpreter=interpreter, torch=torch)
            return outcome(
                "passed", f"trained, verified, type-checked; tests: {run_tests(environment, directory)}"
            )
        except (AssertionError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return outcome("failed", str(error).strip().splitlines()[-1][:120])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", help="these alone")
    parser.add_argument("--cuda", action="store_true", help="CUDA builds, too")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for interpreter in arguments.pythons:
        version = version_of(interpreter)
        if version is None:
            outcomes.append(Outcome(python=interpreter, torch="-", result="not tried", why="no such interpreter on PATH"))  # fmt: skip
            continue
        with tempfile.TemporaryDirectory() as made:
            torches = arguments.torch or torches_for(make_environment(Path(made), interpreter))
        if not torches:
            outcomes.append(Outcome(python=version, torch="-", result="not tried", why="pip finds no torch for it"))  # fmt: skip
        outcomes += [
            try_pair(arguments.wheel, interpreter, version, torch, cuda=arguments.cuda) for torch in torches
        ]
    print(f"\n{'python':<11}{'torch':<13}{'result':<11}{'seconds':>8}  why")
    for each in outcomes:
        print(f"{each.python:<11}{each.torch:<13}{each.result:<11}{each.seconds:>8.0f}  {each.why}")
    tried = [each for each in outcomes if each.result != "not tried"]
    return 0 if tried and all(each.result == "passed" for each in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
