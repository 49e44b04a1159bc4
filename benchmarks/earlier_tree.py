"""Another revision of this repository, built beside this one for as long as it is compared with.

It lies in a git worktree in a temporary directory, with its compiled extension, and is removed at the end, also when whoever asked for it is killed: a
process of its own waits for that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Begins to remove once its input ends. What a killed build still writes meanwhile goes as well.
_REMOVE = """
cat
git -C "$1" worktree remove --force "$2/tree"
while [ -e "$2" ]; do rm -rf "$2"; done
git -C "$1" worktree prune
"""
# Linux kills what was started so when its parent ends (PR_SET_PDEATHSIG), unless that happened before it was asked to.
_DIES = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
# Of a process, and of one that it starts as launchers do.
_ASK = """
import subprocess, sys
import meshloom
print(meshloom.__file__, flush=True)
subprocess.run(sys.argv[1:]) if sys.argv[1:] else None
"""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree of the package. name: as people call its revision."""

    name: str
    path: Path

    def environment(self, **more: str) -> dict[str, str]:
        """In which Python imports this tree's package, where it is not run in another one. Nothing is known of the machine: a tree may not
        read what another one wrote of it."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.path),
            "MESHLOOM_CACHE": "off",
            "HOME": os.devnull,
            "OMP_NUM_THREADS": "1",
            "MESHLOOM_KEEP_RANKS": "1",  # the files read them
            **more,
        }

    def start(self, words: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        """Python with these words, run in this tree, so that it and those that it starts import its package; it dies with this process.
        settings: of `Popen`."""
        return subprocess.Popen(
            _dying_with_us([sys.executable, "-P", *words]), cwd=self.path, env=self.environment(), **settings
        )


THIS = Tree(name="this tree", path=ROOT)


@contextmanager
def earlier_tree(revision: str, *, compiled: bool = True) -> Iterator[Tree]:
    """The tree of `revision`, in a directory of its own, in which others may write what goes with it. compiled: with its extension, as ranks
    of one host talk through it. Raises `SystemExit` with git's words for what is no revision, and the compiler's where it fails."""
    directory = tempfile.mkdtemp(prefix="meshloom-earlier-")
    remover = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", str(ROOT), directory], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert remover.stdin is not None
    try:
        path = Path(directory, "tree")
        _run(["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", str(path), revision])
        if compiled:
            _run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=path)
        tree = Tree(name=revision, path=path)
        with tree.start(["-c", _ASK, sys.executable, "-c", _ASK], stdout=subprocess.PIPE) as asked:
            imported = asked.communicate()[0].decode().split()
        assert len(imported) == 2, imported
        assert all(Path(each).is_relative_to(path) for each in imported), (
            f"{imported} are imported in place of {path}"
        )
        yield tree
    finally:
        remover.stdin.close()
        remover.wait()


def _run(command: Sequence[str], cwd: Path = ROOT) -> None:
    done = subprocess.run(_dying_with_us(command), cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip()}")


def _dying_with_us(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _DIES, str(os.getpid()), *command]
