"""Tries a wheel with versions of Python and torch: each pair in a fresh environment, where a job is trained, verified and
type-checked (tests/installing.py) and a small set of tests runs; a table says what came of it.

    python -m tests.versions dist/meshloom-*.whl [--pythons python3.11 python3.12] [--torch 2.13.0+cpu] [--cuda]

Interpreters are looked for on PATH. Torch is the newest of each of its versions from 2.11 on that pip finds. On Linux only builds
for CPUs alone are tried, whose versions end in +cpu: the others bring CUDA's libraries, gigabytes, and need --cuda. Where CPU
builds are is a matter of pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). Exit code 1 where a pair fails or none was tried.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from tests.installing import ROOT, limits_without, make_environment, try_installed

PYTHONS = ["python3.11", "python3.12", "python3.13"]
OLDEST = Version("2.11")
TESTS = ["test_plan.py", "test_schedule.py", "test_checkpoint.py", "test_trainer.py", "test_program.py"]
NEEDED = ["pytest", "pytest-timeout", "hypothesis", "psutil", "expecttest", "scikit-learn", "tqdm"]


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
    """The newest of each second number from 2.11 on, of those for CPUs alone if there are any.

    >>> newest_of_each(["2.13.1", "2.13.0+cpu", "2.12.0", "2.12.1", "2.10.0"])
    ['2.12.1', '2.13.0+cpu']
    """
    newest: dict[tuple[int, ...], Version] = {}
    for each in map(Version, versions):
        if each >= OLDEST and not each.is_prerelease:
            known = newest.get(each.release[:2], each)
            newest[each.release[:2]] = max(each, known, key=lambda one: (one.local == "cpu", one))
    return [str(newest[key]) for key in sorted(newest)]


def torches_for(python: Path) -> list[str]:
    """Those that pip finds for this interpreter."""
    done = subprocess.run([python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    return newest_of_each(listed[1].split(", ")) if listed else []


def obstacle(torch: str) -> str:
    """Why this build is not tried; empty if nothing is against it.

    >>> obstacle("2.13.0+cpu")
    ''
    """
    if sys.platform != "linux" or Version(torch).local == "cpu":
        return ""
    return "no build for CPUs alone was found, and one with CUDA is gigabytes to download (--cuda)"


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
    assert done.returncode == 0, f"the tests: {done.stdout[-3000:]}{done.stderr[-1000:]}"
    counts = re.findall(r"\d+ (?:passed|failed|skipped)", done.stdout) or [
        done.stdout.strip().splitlines()[-1]
    ]
    return ", ".join(counts)


def try_pair(wheel: Path, interpreter: str, python: str, torch: str) -> Outcome:
    """One pair in a directory of its own, which is removed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        try:
            environment = try_installed(wheel, directory, compiled=True, interpreter=interpreter, torch=torch)
            result, why = (
                "passed",
                f"trained, verified, type-checked; tests: {run_tests(environment, directory)}",
            )
        except (AssertionError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            result, why = "failed", str(error).strip().splitlines()[-1][:120]
    seconds = time.monotonic() - begun
    return Outcome(python=python, torch=torch, result=result, why=why, seconds=seconds)


def outcomes_of(wheel: Path, interpreter: str, torches: list[str] | None, *, cuda: bool) -> Iterator[Outcome]:
    """Those of one interpreter. torches: which alone; None: all that pip finds."""
    version = version_of(interpreter)
    if version is None:
        yield Outcome(
            python=interpreter, torch="-", result="not tried", why="no such interpreter runs from PATH"
        )
        return
    with tempfile.TemporaryDirectory() as made:
        asked = make_environment(Path(made), interpreter)
        torches = torches or torches_for(asked)
    if not torches:
        yield Outcome(python=version, torch="-", result="not tried", why="pip finds no torch for it")
    for torch in torches:
        if not cuda and (why := obstacle(torch)):
            yield Outcome(python=version, torch=torch, result="not tried", why=why)
        else:
            yield try_pair(wheel, interpreter, version, torch)


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
        for each in outcomes_of(arguments.wheel, interpreter, arguments.torch, cuda=arguments.cuda):
            print(f"python {each.python}, torch {each.torch}: {each.result}, {each.why}", flush=True)
            outcomes.append(each)
    print(f"\n{'python':<11}{'torch':<13}{'result':<11}{'seconds':>8}  why")
    for each in outcomes:
        print(f"{each.python:<11}{each.torch:<13}{each.result:<11}{each.seconds:>8.0f}  {each.why}")
    tried = [each for each in outcomes if each.result != "not tried"]
    return 0 if tried and all(each.result == "passed" for each in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
