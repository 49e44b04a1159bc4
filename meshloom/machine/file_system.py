"""The file system that a directory is on: whether it keeps files in memory, or on other machines."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
# what their kinds begin with; "fuse." stands for those that programs provide, most of which are remote
REMOTE = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "gluster",
    "afs",
    "9p",
    "virtiofs",
    "fuse.",
    "wekafs",
    "orangefs",
)


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


def is_remote(directory: Path) -> bool:
    """Whether files there are on another machine, as far as the kind of the file system tells."""
    return file_system_of(directory).startswith(REMOTE)
