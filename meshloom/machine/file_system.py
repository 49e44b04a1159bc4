"""The file system that a directory is on, and whether that keeps files in memory."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def file_system_of(directory: Path) -> str:
    """Its kind, such as "ext4"; "" where the system does not say.

    >>> file_system_of(Path("/proc"))
    'proc'
    """
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return ""
    # ID PARENT MAJOR:MINOR ROOT POINT OPTIONS ... - KIND SOURCE ...
    for line in reversed(mounts):
        if line.split()[2] == wanted:
            return line.partition(" - ")[2].split()[0]
    return ""


def keeps_in_memory(directory: Path) -> bool:
    """Whether files there take memory, not disk."""
    return file_system_of(directory) in IN_MEMORY
