"""What went wrong on a rank that saves, as JSON for the others, and as the sentence that all of them raise."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshloom.checkpoint.format import committed
from meshloom.core.errors import CheckpointError
from meshloom.core.units import format_bytes

Problem = dict[str, Any]  # rank, reason, bytes needed, bytes free if there were too few


def attempt(rank: int, directory: Path, needed: int, action: Callable[[], Any]) -> Problem | None:
    """Runs `action`; returns the problem, if any, for the other ranks."""
    try:
        action()
    except (OSError, CheckpointError) as error:
        reason, full = str(error), False
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror + (f" ({error.filename})" if error.filename else "")
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return {"rank": rank, "reason": reason, "needed": needed, "free": _free(directory) if full else None}
    return None


def first_problem(everyone: Iterable[Mapping[str, Any]]) -> Problem | None:
    """That of the first rank that has one."""
    return next((each["problem"] for each in everyone if each["problem"] is not None), None)


def sentence_of(directory: Path, step: int, problem: Mapping[str, Any]) -> str:
    """The message of the error that all ranks raise."""
    room = (
        f" It needs {format_bytes(problem['needed'])} there, and {format_bytes(problem['free'])} are free."
        if problem["free"] is not None
        else ""
    )
    older = committed(directory)
    previous = (
        f"The checkpoint before it is whole: {older[0]}." if older else "There is no earlier checkpoint."
    )
    return f"Rank {problem['rank']} cannot save step {step} in {directory}: {problem['reason']}.{room} {previous}"


def _free(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None
