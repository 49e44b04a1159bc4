"""A process that outlives a killed launcher, kills the ranks, and removes their shared directories."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from meshloom.launch.processes.child import start_child

# Reads "+group", "-group" and "/" with a directory's bytes in hexadecimal, since names may have any
# characters. When the pipe closes, kills the remaining groups, then removes the directories.
_GUARD = """
import os, shutil, signal, sys, time
groups, directories = set(), []
for line in sys.stdin:
    if line[0] == "/":
        directories.append(bytes.fromhex(line[1:]))
    else:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:  # it has ended already
        pass
for directory in directories:
    for _ in range(50):  # who was killed may be writing for a moment
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            break
        time.sleep(0.1)
"""


class Guard:
    """The guard process, as a context manager."""

    def __enter__(self) -> Guard:
        self._process = start_child([sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE)
        return self

    def tell(self, sign: Literal["+", "-"], group: int) -> None:
        """Add a process group to those that end with this process, or remove it."""
        self._write(f"{sign}{group}\n")

    def removes(self, directory: Path) -> None:
        """Remove this directory when this process ends."""
        assert directory.is_absolute()
        self._write(f"/{os.fsencode(directory).hex()}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # somebody has killed the guard
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
