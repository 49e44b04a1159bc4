"""`meshloom adopt`: the lines of a loop of one's own are written into a copy of a script, shown as a diff, and verified.

As a process by itself it runs the script up to the first step of its optimizers, and writes what becomes of its files.
"""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshloom.adopt.adopted_lines import AdoptedLines
from meshloom.adopt.watched_loop import Watch
from meshloom.cli.arguments import parse
from meshloom.cli.verb_run import execute, top_of
from meshloom.cli.verb_verify_script import ScriptResult, compare_script
from meshloom.core.errors import JobError
from meshloom.core.modules.packages import is_users
from meshloom.core.plan import Plan
from meshloom.core.random import seed_script
from meshloom.core.units import format_bytes
from meshloom.launch.child_environment import script_environment
from meshloom.launch.devices import choose_devices
from meshloom.launch.environment import of_no_rank, script_seed, use_absolute_import_paths
from meshloom.loops.ranks import check_of_loops
from meshloom.verify.scripts.recorder import EnoughStepsError
from meshloom.verify.scripts.script_verdict import is_of_a_sum

_MOST_BYTES = 2**30  # of a copy
_UNUSED = (".git", ".venv", "__pycache__", "node_modules")
_TOO_LARGE = f"is too large for the copy that the script runs in ({format_bytes(_MOST_BYTES)}). Leave absolute symbolic links in place of what it only reads."
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
    print(*changed_lines(texts), sep="\n")
    _write(texts, out)
    words = f" -- {' '.join(arguments.words)}" if arguments.words else ""
    print("", *told["notes"], *result.lines, sep="\n")
    print(f"Wrote {', '.join(str(out / name) for *_, name in texts)}.")
    print(f"Next: meshloom run {out / texts[0][2]} --plan {runs.plan}{words}")
    return result.code


def changed_lines(texts: Texts) -> Iterator[str]:
    """The diff of these files, by lines; whether a file ends with one is not shown.

    >>> list(changed_lines([("a\\nb", "a\\nc", "t.py")]))
    ['--- a/t.py', '+++ b/t.py', '@@ -1,2 +1,2 @@', ' a', '-b', '+c']
    """
    for before, after, name in texts:
        both = before.splitlines(), after.splitlines()
        yield from difflib.unified_diff(*both, f"a/{name}", f"b/{name}", n=1, lineterm="")


class _Runs:
    """Runs of the script in a copy, in `root`, of the repository, or else of the folder, that it is run in or else is in. plan: that of verification."""

    def __init__(self, arguments: argparse.Namespace, plan: Plan, root: Path) -> None:
        self._arguments, self.plan = arguments, plan
        self._told, self._copy = root / "told.json", root / "copy"
        here, path = Path.cwd().resolve(), Path(arguments.target).resolve()
        here = here if path.is_relative_to(here) else path.parent
        folder = next((each for each in (here, *here.parents) if (each / ".git").exists()), here)
        found = (each for each in folder.rglob("*") if not {*each.relative_to(folder).parts} & {*_UNUSED})
        if sum(each.lstat().st_size for each in found) > _MOST_BYTES:
            raise JobError(f"{folder} {_TOO_LARGE}")
        shutil.copytree(folder, self._copy, symlinks=True, ignore=shutil.ignore_patterns(*_UNUSED))
        self.there, self.script = (self._copy / each.relative_to(folder) for each in (here, path))

    def watched(self) -> dict[str, Any]:
        """What the watched script has shown. Raises `JobError` where it fails."""
        print("running the script up to the first step of its optimizers", file=sys.stderr)
        words = [self._told, str(self._arguments.seconds), self.script, *self._arguments.words]
        kind, _ = choose_devices(self.plan.mesh, self._arguments.devices)
        done = subprocess.run(
            [sys.executable, "-m", "meshloom.cli.verb_adopt", *words], cwd=self.there, env=script_environment(of_no_rank(), 0, kind),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
        if not self._told.exists():
            raise JobError(f"{done.stdout}The script failed before it had trained (exit code {done.returncode}). Its own words follow --.")  # fmt: skip
        return json.loads(self._told.read_text())

    def verified(self, told: dict[str, Any]) -> tuple[Texts, ScriptResult]:
        """The way of writing that is equal, or else the first; others have `ml.sum` of the loss, rows and labels as shares count them,
        batches along dim 1, or whole ones. Where a module normalizes by
        its batch, statistics are those of all shares."""
        first, *others = told["texts"]
        result = self._result(first)
        if result.code and result.normalizes and not self.plan.divides_loss:
            self.plan = replace(self.plan, sync_batch_norm=True)
            result = self._result(first)
        if result.factor is not None and is_of_a_sum(result.factor, self.plan.dp):
            others = [told["total"]]
        for texts in others if result.code else []:
            if texts != first and not (other := self._result(texts)).code:
                told["notes"] += [_WHOLE] if texts == told["texts"][-1] else []
                return texts, other
        return first, result

    def _result(self, texts: Texts) -> ScriptResult:
        options = ["--plan", str(self.plan), "--devices", self._arguments.devices]
        with chdir(self.there):
            _write(texts, top_of(str(self.script)))
            found = compare_script(
                parse(["verify", str(self.script), *options, "--", *self._arguments.words])
            )
        return found._replace(lines=[each.replace(f"{self._copy}/", "") for each in found.lines])


def _write(texts: Texts, folder: Path) -> None:
    for _, after, name in texts:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(after.encode())


def _watch(target: str, seconds: str, script: str, *words: str) -> None:
    watch = Watch()
    signal.signal(signal.SIGALRM, watch.end)
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    seed_script(script_seed())
    with suppress(EnoughStepsError), watch:
        execute(script, words)
    signal.setitimer(signal.ITIMER_REAL, 0)
    files = _own_files(Path(script).absolute())
    dims: list[tuple[int | None, bool]] = [(0, False), (0, True), (1, False), (None, False)]
    ways = [AdoptedLines(watch, files, dim=dim, counted=counted) for dim, counted in dims]
    *texts, total = (
        [(*each.texts(), files[Path(path)]) for path, each in way.sources.items()]
        for way in (*ways, AdoptedLines(watch, files, dim=0, total=True))
    )
    told = {"notes": ways[0].notes, "modules": ways[0].modules, "texts": texts, "total": total}
    Path(target).write_text(json.dumps(told), encoding="utf-8")


def _own_files(script: Path) -> dict[Path, str]:
    """The script and the user's files that it has imported, each with its place below where imports begin."""
    found = {script: str(script.resolve().relative_to(top_of(str(script))))}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and path.is_absolute() and is_users(str(path)) and path != script:
            inside = name.split(".") + ["__init__"] * (path.stem == "__init__")
            found[path] = f"{'/'.join(inside)}.py"
    return found


if __name__ == "__main__":
    _watch(*sys.argv[1:])
