"""Resident memory of this process: its peak, what it may take again, and what it need not keep."""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
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
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def collected_once() -> Generator[None]:
    """Objects that are there before are looked through for cycles once, now: with torch and a library of models these are a
    million, which take longer each time than what is made within."""
    if gc.get_freeze_count():  # by the caller, who would find it undone
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Shortage:
    """Whether memory is short, as far as this process knows: then freed memory is returned between the phases of a run."""

    is_there = False

    @classmethod
    def trim(cls) -> None:
        """`trim`, where memory is short."""
        if cls.is_there:
            trim()


@cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
