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
    wanted = ((True, False), (True, True), (False, False))
    ways = [AdoptedLines(watch, files, share=share, total=total) for share, total in wanted]
    texts = [[(*each.texts(), files[Path(path)]) for path, each in way.sources.items()] for way in ways]
    told = {"notes": ways[0].notes, "modules": ways[0].modules, "shares": ways[0].shares, "texts": texts}
    Path(target).write_text(json.dumps(told), encoding="utf-8")


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
