"""Memory of this machine and of this process, now."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # of this process, in a container; version 2


def free_bytes(group: Path = _GROUP) -> int:
    """Memory that processes can still take on this machine, or in the container that limits this one.

    group: the directory of its limits.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    limited = _left_in_group(group)
    return 1024 * int(available) if limited is None else min(1024 * int(available), limited)


def regained_bytes() -> int:
    """What this process held at its peak and does not hold now, and is likely to take again."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    facts = dict(line.split(":", 1) for line in lines)
    peak, now = (1024 * int(facts[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return max(peak - now, 0)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _left_in_group(group: Path) -> int | None:
    """Below the container's limit; None: it has none. What it has of files counts as free."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(int(limit) - int(used) + int(files["inactive_file"]), 0)
    except (OSError, KeyError, ValueError):
        return None
