"""Starts a process: the one way in which this package does."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def start_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    passed: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    output: int | None = subprocess.DEVNULL,
    own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """A process that inherits the descriptors `passed` and no others. Raises `OSError`.

    environment: all of it; None: as here. stdin: of `subprocess`. output: likewise, of stdout and stderr
    together; None: those of this process.
    own_session: Ctrl-C in the terminal and signals to this process's group do not reach it, and it leads a
    process group, by which it is ended together with what it has started.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT if output == subprocess.PIPE else output,
        env=environment,
        pass_fds=passed,
        start_new_session=own_session,
    )
