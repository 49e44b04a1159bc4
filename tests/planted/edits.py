"""Bugs that are edits of the package's source, how one is made in a copy of it, and how a list of them is judged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import meshloom
from tests.machine import save_fast_links

PACKAGE = Path(meshloom.__file__).parent
TIMEOUT_SECONDS = 300
SLOW = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(TIMEOUT_SECONDS + 60)]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """file: of the package; `old` is in it once and becomes `new`. job: "MODULE:NAME" in the list's folder. says: a part of the report
    that names the truth, empty where the report has none. module: the first one that is wrong, if there is one."""

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

    def is_in_the_code_once(self) -> None:
        """As otherwise it is to be written anew for the code that is there now."""
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        assert text.count(self.old) == 1, self._misplaced(text)
        assert self.old != self.new

    def planted(self, package: Path) -> None:
        """Edits the copy of the package."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, self._misplaced(text)
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def _misplaced(self, text: str) -> str:
        return (
            f"{self.name}: meshloom/{self.file} has its old text {text.count(self.old)} times instead of once. "
            f"Write the bug anew for the code that is there now:\n{self.old}"
        )


@dataclass(frozen=True, kw_only=True)
class EditList:
    """Bugs, the folder of the jobs that they are verified in, and the misses: names with their reasons."""

    jobs: Path
    edits: list[Edit] = field(default_factory=list)

    def edit(
        self,
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
        if (
            found not in self.edits
        ):  # pytest imports a module twice that is in a package and has doctests collected
            self.edits.append(found)

    def cases(self, quick: Iterable[str] = ()) -> list[Any]:
        """The bugs as parameters of a test, slow but for those that are quick."""
        return [
            pytest.param(each, id=each.name, marks=[] if each.name in quick else _marks(each.devices))
            for each in self.edits
        ]

    def runs(self) -> list[Any]:
        """What is verified, without bugs, as parameters of a test."""
        runs = sorted({each.run for each in self.edits})
        return [pytest.param(*run, id="-".join(run).replace("/", "."), marks=_marks(run[2])) for run in runs]

    def lists_each_miss(
        self, caught: Mapping[str, str], named: Mapping[str, str], placed: Mapping[str, str]
    ) -> None:
        """That the misses are bugs of this list, and that the others say what is expected of a report."""
        names = Counter(each.name for each in self.edits)
        assert len(names) == len(self.edits), [name for name, count in names.items() if count > 1]
        assert {*caught, *named, *placed} <= set(names), {*caught, *named, *placed} - set(names)
        for each in self.edits:
            assert each.says or each.name in {*caught, *named}, each.name
            assert each.module is not None or each.name not in placed, each.name

    def verified(self, folder: Path, job: str, plan: str, devices: str) -> Verified:
        """The job verified by the copy of the package in the folder, with an empty cache of programs, on a machine with fast
        links: what was measured decides which operators are divided, and without measurements fewer are.

        The job file lies beside the copy: where it is one of a package, loading it would put the repository, and its meshloom, first on the
        path of the processes that are started."""
        module, name = job.split(":")
        file = shutil.copy(self.jobs / f"{module}.py", folder)
        save_fast_links(folder)
        environment = {
            **os.environ,
            "HOME": str(folder),
            "PYTHONPATH": str(folder),
            "MESHLOOM_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "meshloom", "verify", f"{file}:{name}", "--plan", plan]
        done = subprocess.run(
            [*command, "--devices", devices],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        return Verified(code=done.returncode, printed=done.stdout)

    def found(self, bug: Edit, folder: Path) -> Verified:
        """What is said of the bug."""
        bug.planted(copied(folder))
        return self.verified(folder, *bug.run)

    def is_equal(self, folder: Path, job: str, plan: str, devices: str) -> None:
        """That the job is equal under the plan without a bug."""
        copied(folder)
        found = self.verified(folder, job, plan, devices)
        assert found.code == 0 and "EQUAL" in found.text and "DIFFERS" not in found.text, found.text


@dataclass(frozen=True, kw_only=True)
class Verified:
    """How `meshloom verify` ended, and what it printed."""

    code: int
    printed: str

    @property
    def text(self) -> str:
        """What it printed, in one line."""
        return " ".join(self.printed.split())

    @property
    def module(self) -> str | None:
        """The first one that is said to be wrong; "" is the model itself."""
        found = re.search(r"first module: (the whole model|the model or loss|[^\s;,]+)", self.text)
        if found is None:
            return None
        return "" if " " in found[1] else found[1]

    @property
    def first_cause(self) -> str:
        """What is said first to be the cause; all that was printed, where no cause is looked for."""
        lines = [line.strip() for line in self.printed.splitlines()]
        return next((line for line in lines if line.startswith("likely cause: ")), self.text)


def copied(folder: Path) -> Path:
    """A copy of the package in the folder, with what is compiled of it: only what is edited is compiled again."""
    package = folder / "meshloom"
    # what another process is compiling is there under another name, and gone at once
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.pyc.*"))
    return package


def _marks(devices: str) -> list[pytest.MarkDecorator]:
    return [*SLOW, pytest.mark.processes] if devices == "cpu" else SLOW
