"""The files that a script writes or removes, with the line that does: where several ranks do, one may undo what another has done."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from meshloom.core.modules.packages import is_users

# events -> paths in their arguments
_CHANGES = {"os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ScriptFiles:
    """Notes each path once from now on, for the life of the process.

    own: a directory whose files are not the script's. lines: by path, the line that was first to write it.
    """

    def __init__(self, own: Path) -> None:
        self.lines: dict[str, str] = {}
        self._own = str(own.resolve())
        sys.addaudithook(self._hear)

    def saving(self, save: Any) -> Any:
        """torch.save, which opens files outside of Python, as what is noted, too."""

        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, str | os.PathLike):
                self._note(f)
            save(obj, f, *args, **kwargs)

        return saved

    def _hear(self, event: str, args: Sequence[Any]) -> None:
        if event == "open":
            _, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self._note(args[0])
        elif event in _CHANGES:
            for path in args[: _CHANGES[event]]:
                self._note(path)

    def _note(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor
        full = os.path.abspath(os.fsdecode(path))
        is_own = full.startswith((self._own, "/dev/", "/proc/")) or full.endswith(".pyc")
        if not is_own and full not in self.lines and (line := _users_line(inspect.currentframe())):
            self.lines[full] = line


def written_by_several(lines: Sequence[dict[str, str]]) -> list[str]:
    """A sentence for each path that more than one rank has written or removed. lines: of each rank.

    >>> written_by_several([{"/a": "t.py:3", "/b": "t.py:4"}, {"/a": "t.py:3"}])
    ['/a (t.py:3)']
    """
    paths = {path: line for each in reversed(lines) for path, line in each.items()}
    return [
        f"{path} ({line})" for path, line in sorted(paths.items()) if sum(path in each for each in lines) > 1
    ]


def _users_line(frame: FrameType | None) -> str:
    """The innermost line that is of no library; "": there is none, or a library does this as it is imported."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        name = frame.f_code.co_filename
        if is_users(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
