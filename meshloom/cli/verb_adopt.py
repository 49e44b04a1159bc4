"""`meshloom adopt`: the lines of a loop of one's own are written into a copy of a script, shown as a diff, and verified."""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from meshloom.cli.arguments import parse
from meshloom.cli.verb_verify_script import ScriptResult, compare_script
from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from meshloom.core.units import format_bytes
from meshloom.launch.child_environment import script_environment
from meshloom.launch.devices import choose_devices
from meshloom.launch.environment import of_no_rank, use_absolute_import_paths
from meshloom.loops.ranks import check_of_loops
from meshloom.verify.scripts.script_verdict import is_of_a_sum

_MOST_BYTES = 2**30  # of a copy
_UNUSED = (".git", ".venv", "__pycache__", "node_modules")
_TOO_LARGE = f"is too large for the copy that the script runs in ({format_bytes(_MOST_BYTES)}). Name what it only reads as --link PATH."
_NOTHING = "NOT ADOPTED: no module was found that trains, or no place where it becomes parallel."
_WHOLE = "Each replica computes whole batches: shares of them compute something else."

Texts = list[tuple[str, str, str]]  # of each file: what it was, what it is, its name


def adopt_script(arguments: argparse.Namespace) -> int:
    """Exit code: 0 if the adopted script equals itself under the plan, 1 if it differs, 2 if that could not be computed, or there is none."""
    script, out, plan = Path(arguments.target), Path(arguments.out), Plan.parse(arguments.plan)
    if not script.is_file() or script.suffix != ".py":
        raise JobError(f"There is no Python file {script}. Give the training script, as FILE.py.")
    if out.exists():
        raise JobError(f"{out} exists. Remove it, or give another folder as --out DIR.")
    check_of_loops(plan)
    use_absolute_import_paths()
    with tempfile.TemporaryDirectory(prefix="meshloom-") as root:
        runs = _Runs(arguments, plan, Path(root).resolve())
        told = runs.watched()
        if not told["modules"]:
            raise JobError("\n".join([_NOTHING, *told["notes"]]))
        texts, result = runs.verified(told)
    for before, after, name in texts:
        both = before.splitlines(keepends=True), after.splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(*both, f"a/{name}", f"b/{name}", n=1))
    _write(texts, out)
    words = f" -- {' '.join(arguments.words)}" if arguments.words else ""
    print("", *told["notes"], *result.lines, sep="\n")
    print(f"Wrote {', '.join(str(out / name) for *_, name in texts)}.")
    print(f"Next: meshloom run {out / script.name} --plan {plan}{words}")
    return result.code


class _Runs:
    """Runs of the script, each in a copy in `root` of the repository, or else of the folder, that it runs in or else is in."""

    def __init__(self, arguments: argparse.Namespace, plan: Plan, root: Path) -> None:
        self._arguments, self._plan, self._root = arguments, plan, root
        here, path = Path.cwd().resolve(), Path(arguments.target).resolve()
        self._here = here if path.is_relative_to(here) else path.parent
        around = (each for each in (self._here, *self._here.parents) if (each / ".git").exists())
        self._folder = next(around, self._here)
        self._script = path.relative_to(self._folder)

    def watched(self) -> dict[str, Any]:
        """What the watched script has shown. Raises `JobError` where it fails."""
        copy, told = self._copy(), self._root / "told.json"
        print("running the script up to the first step of its optimizers", file=sys.stderr)
        words = [told, str(self._arguments.seconds), copy / self._script, *self._arguments.words]
        kind, _ = choose_devices(self._plan.mesh, self._arguments.devices)
        done = subprocess.run(
            [sys.executable, "-m", "meshloom.cli.watched_script", *words], cwd=self._there(copy), env=script_environment(of_no_rank(), 0, kind),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
        if not told.exists():
            raise JobError(f"{done.stdout}The script failed before it had trained (exit code {done.returncode}). Its own words follow --.")  # fmt: skip
        return json.loads(told.read_text())

    def verified(self, told: dict[str, Any]) -> tuple[Texts, ScriptResult]:
        """The way of writing that is equal, or else the first; others have `ml.sum` of the loss, batches along another dim, or whole ones."""
        first = told["texts"][0]
        result = self._result(first)
        if result.factor is not None and is_of_a_sum(result.factor, self._plan.dp):
            other = self._result(told["total"])
            return (first, result) if other.code else (told["total"], other)
        for at, texts in enumerate(told["texts"][1:] if result.code else [], 1):
            if texts not in told["texts"][:at] and not (other := self._result(texts)).code:
                told["notes"] += [_WHOLE] if texts == told["texts"][-1] else []
                return texts, other
        return first, result

    def _result(self, texts: Texts) -> ScriptResult:
        copy = self._copy()
        script = copy / self._script
        _write(texts, script.parent)
        options = ["--plan", str(self._plan), "--devices", self._arguments.devices]
        with chdir(self._there(copy)):
            result = compare_script(parse(["verify", str(script), *options, "--", *self._arguments.words]))
        return result._replace(lines=[each.replace(f"{copy}/", "") for each in result.lines])

    def _there(self, copy: Path) -> Path:
        return copy / self._here.relative_to(self._folder)

    def _copy(self) -> Path:
        copy, total = Path(tempfile.mkdtemp(dir=self._root)), 0
        links = {self._here / each for each in self._arguments.link}

        def passed_over(folder: str, names: list[str]) -> list[str]:
            nonlocal total
            found = [each for each in names if each in _UNUSED or Path(folder) / each in links]
            total += sum((Path(folder) / each).lstat().st_size for each in {*names} - {*found})
            if total > _MOST_BYTES:
                raise JobError(f"{self._folder} {_TOO_LARGE}")
            return found

        shutil.copytree(self._folder, copy, symlinks=True, ignore=passed_over, dirs_exist_ok=True)
        for each in links:
            (copy / each.relative_to(self._folder)).symlink_to(each)
        return copy


def _write(texts: Texts, folder: Path) -> None:
    for _, after, name in texts:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(after.encode())
