"""A process of `meshloom adopt SCRIPT.py`: runs the script up to the first step of its optimizers, and writes what becomes of its files.

Arguments: the file to write, as JSON; the limit in seconds; the script; its words.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

from meshloom.adopt.adopted_lines import AdoptedLines
from meshloom.adopt.watched_loop import Watch
from meshloom.cli.verb_run import execute
from meshloom.core.modules.packages import is_users
from meshloom.core.random import seed_script
from meshloom.launch.environment import script_seed
from meshloom.verify.scripts.recorder import EnoughStepsError


def main(target: str, seconds: str, script: str, *words: str) -> None:
    """Run it, and write."""
    watch = Watch()
    signal.signal(signal.SIGALRM, watch.end)
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    seed_script(script_seed())
    with suppress(EnoughStepsError), watch:
        execute(script, words)
    signal.setitimer(signal.ITIMER_REAL, 0)
    files = _own_files(Path(script).absolute())
    dims = _dims(watch)
    ways = [AdoptedLines(watch, files, dim=dim, total=False) for dim in (*dims, None)]
    texts = [_texts(each, files) for each in ways]
    total = _texts(AdoptedLines(watch, files, dim=dims[0], total=True), files)
    told = {"notes": ways[0].notes, "modules": ways[0].modules, "texts": texts, "total": total}
    Path(target).write_text(json.dumps(told), encoding="utf-8")


def _texts(lines: AdoptedLines, files: dict[Path, str]) -> list[tuple[str, str, str]]:
    return [(*each.texts(), files[Path(path)]) for path, each in lines.sources.items()]


def _dims(watch: Watch) -> list[int]:
    """Dims of a batch that comes from no loader: those along which all inputs have one length, or else the first."""
    calls = [each.shapes.values() for each in watch.trained(methods=True) if not each.loaders]
    lengths = ([each[dim : dim + 1] for call in calls for found in call for each in found] for dim in (0, 1))
    agreeing = [dim for dim, each in enumerate(lengths) if len(set(each)) == 1 and () not in each]
    return list(dict.fromkeys([*agreeing, 0]))


def _own_files(script: Path) -> dict[Path, str]:
    """The script and the user's files that it has imported, each with its place beside the script."""
    found = {script: script.name}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and path.is_absolute() and is_users(str(path)) and path != script:
            inside = name.split(".") + ["__init__"] * (path.stem == "__init__")
            found[path] = f"{'/'.join(inside)}.py"
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
