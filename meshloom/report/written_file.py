"""Files that a command is asked to write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from meshloom.core.errors import ReportError


def write_file(path: Path, text: str) -> None:
    """Raises `ReportError` if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(path, error.strerror or "") from None


def check_directory(path: Path) -> None:
    """Before the work whose result the file gets. Raises `ReportError` if it could have no place."""
    if not path.parent.is_dir():
        raise _refusal(path, os.strerror(errno.ENOENT))


def _refusal(path: Path, why: str) -> ReportError:
    return ReportError(f"{path} cannot be written: {why}. Give a file in a directory that exists.")
