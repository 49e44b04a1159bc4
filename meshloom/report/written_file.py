"""Files that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from meshloom.core.errors import ReportError


def write_file(path: Path, text: str) -> None:
    """Raises `ReportError` if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror}. Give a file in a directory that exists."
        ) from None
