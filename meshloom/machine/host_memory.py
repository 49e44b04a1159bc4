"""Memory of this host, as far as this process may use it: what there is, and what is free.

A container may have less than its host: the limit of its control group counts, too.
"""

from __future__ import annotations

import os
from pathlib import Path

# of a control group, version 2 and version 1: the limit, and what is used
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def total_bytes() -> int:
    """Bytes of memory that this process and others of its container can have at most."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _, _ in _limits())])


def free_bytes() -> int:
    """Available memory: free, or taken by pages of files that can be read again."""
    free = [limit - used + files for limit, used, files in _limits()]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return min([total_bytes(), *free])
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return min([1024 * int(available), *free])


def _limits() -> list[tuple[int, int, int]]:
    """Of each control group that has a limit: it, what is used of it, and how much of that is pages of files."""
    found: list[tuple[int, int, int]] = []
    for limit, used, stat in _GROUPS:
        try:
            text = Path(limit).read_text(encoding="ascii").strip()
            files = [
                line.split()[1]
                for line in Path(stat).read_text(encoding="ascii").splitlines()
                if line.split()[0] in ("inactive_file", "total_inactive_file")
            ]
            if text != "max":
                found.append(
                    (int(text), int(Path(used).read_text(encoding="ascii")), int(files[-1]) if files else 0)
                )
        except (OSError, ValueError, IndexError):  # there is no such group, or no file system of groups
            continue
    return found
