"""Makes the C library keep freed memory of CPU tensors, because the next step allocates the same amount; or return
all of it at once, where memory is short.

glibc returns freed memory to the system when much of it is contiguous. The next step then gets new pages,
each of which the system zeroes at the first access: thousands of page faults a step.

    as it comes    step 1  allocate, touch, free ->  system  -> step 2  allocate, touch ...
    kept           step 1  allocate, touch, free ->  step 2  allocate ...

What is kept lies between tensors that are in use, and does not fit all that come later: under zero=3 ranks of a large
model held twice their tensors.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

from meshloom.launch.environment import allocator_is_set
from meshloom.machine.process_memory import Shortage, trim

# Parameters of glibc's mallopt(3): glibc reads its environment variables only when the process starts.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST_ARENAS = -1, -3, -8
_NEVER = -1
_LARGEST_KEPT = 32 << 20  # bytes; glibc accepts no larger threshold, and returns larger blocks immediately
_LEAST_RETURNED = 1 << 20  # bytes of a block, where memory is short
_LARGEST_END = 8 << 20  # bytes at the end of a heap that are kept, there


def keep_freed_memory() -> bool:
    """Keep freed memory from now on; False without glibc, or if the user has set its allocator."""
    Shortage.is_there = False
    return _set(_LARGEST_KEPT, _NEVER)


def return_freed_memory() -> bool:
    """Return freed memory from now on, and what has been kept so far: large blocks at once, small ones between the
    phases of a run. False as `keep_freed_memory`."""
    if not _set(_LEAST_RETURNED, _LARGEST_END):
        return False
    Shortage.is_there = True
    trim()
    return True


def share_freed_memory() -> bool:
    """Let the threads that are made from now on take what another has freed, as one of them runs at a time. False as
    `keep_freed_memory`."""
    return _mallopt({_MOST_ARENAS: 1})


def _set(mmap_threshold: int, trim_threshold: int) -> bool:
    return _mallopt({_MMAP_THRESHOLD: mmap_threshold, _TRIM_THRESHOLD: trim_threshold})


def _mallopt(values: Mapping[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc" or allocator_is_set():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) for name, value in values.items())
