"""Makes the C library keep freed memory of CPU tensors, because the next step allocates the same amount.

glibc returns freed memory to the system when much of it is contiguous. The next step then gets new pages,
each of which the system zeroes at the first access: thousands of page faults a step.

    as it comes    step 1  allocate, touch, free ->  system  -> step 2  allocate, touch ...
    kept           step 1  allocate, touch, free ->  step 2  allocate ...
"""

from __future__ import annotations

import ctypes
import platform

from meshloom.launch.environment import allocator_is_set

# Parameters of glibc's mallopt(3): glibc reads its environment variables only when the process starts.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = 32 << 20  # bytes; glibc accepts no larger threshold, and returns larger blocks immediately


def keep_freed_memory() -> bool:
    """Keep freed memory from now on; False without glibc, or if the user has set its allocator."""
    if platform.libc_ver()[0] != "glibc" or allocator_is_set():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
