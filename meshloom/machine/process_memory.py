"""Resident memory of this process: its peak, what it may take again, and what it need not keep."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def regained_bytes() -> int:
    """What this process held at its peak and does not hold now, and is likely to take again."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    facts = dict(line.split(":", 1) for line in lines)
    peak, now = (1024 * int(facts[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return max(peak - now, 0)


def trim() -> None:
    """Returns to the system what the C library keeps of freed memory, where that is glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
