"""The fourth list, of bugs that are edits of the package's source, and how one is made in a copy of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import meshloom

PACKAGE = Path(meshloom.__file__).parent
JOBS = Path(__file__).parent / "jobs"
TIMEOUT_SECONDS = 300
EDITS: list[Edit] = []


@dataclass(frozen=True, kw_only=True)
class Edit:
    """file: of the package; `old` is in it once and becomes `new`. job: "MODULE:NAME" in `jobs`. says: a part of the report that names
    the truth, empty where the report has none. module: the first one that is wrong, if there is one."""

    name: str
    file: str
    old: str
    new: str
    job: str
    plan: str
    devices: str
    truth: str
    says: str
    module: str | None

    @property
    def run(self) -> tuple[str, str, str]:
        """What is verified, without the bug."""
        return self.job, self.plan, self.devices

    def planted(self, package: Path) -> None:
        """Edits the copy of the package."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, self.misplaced(text)
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def misplaced(self, text: str) -> str:
        """For an assertion that the text has `old` once."""
        return (
            f"{self.name}: meshloom/{self.file} has its old text {text.count(self.old)} times instead of once. "
            f"Write the bug anew for the code that is there now:\n{self.old}"
        )


def edit(
    name: str,
    file: str,
    *,
    old: str,
    new: str,
    job: str,
    plan: str,
    truth: str,
    says: str = "",
    module: str | None = None,
    devices: str = "simulated",
) -> None:
    """Adds a bug to the list."""
    found = Edit(
        name=name,
        file=file,
        old=old,
        new=new,
        job=job,
        plan=plan,
        devices=devices,
        truth=truth,
        says=says,
        module=module,
    )
    if found not in EDITS:  # pytest imports a module twice that is in a package and has doctests collected
        EDITS.append(found)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """How `meshloom verify` ended, and what it printed, in one line."""

    code: int
    text: str

    @property
    def module(self) -> str | None:
        """The first one that is said to be wrong."""
        found = re.search(r"first module: ([^\s;,]+)", self.text)
        return found[1] if found else None


def copied(folder: Path) -> Path:
    """A copy of the package's source in the folder, with what is compiled for it and no caches."""
    package = folder / "meshloom"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def verified(folder: Path, job: str, plan: str, devices: str) -> Verified:
    """The job verified by the copy of the package in the folder, with an empty cache of programs.

    The job file lies beside the copy: where it is one of a package, loading it would put the repository, and its meshloom, first on the
    path of the processes that are started."""
    module, name = job.split(":")
    file = shutil.copy(JOBS / f"{module}.py", folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "MESHLOOM_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    command = [
        sys.executable,
        "-m",
        "meshloom",
        "verify",
        f"{file}:{name}",
        "--plan",
        plan,
        "--devices",
        devices,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return Verified(code=done.returncode, text=" ".join(done.stdout.split()))
