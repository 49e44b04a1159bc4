"""Makes the C library keep the memory that tensors on CPUs have freed, because the next step asks for as much
again.

glibc gives freed memory back to the system when there is much of it in one place. The next step then gets
other pages, and the system fills each with zeros when it is touched first: thousands of interruptions a step.

    as it comes    step 1  allocate, touch, free ->  system  -> step 2  allocate, touch ...
    kept           step 1  allocate, touch, free ->  step 2  allocate ...
"""

from __future__ import annotations

import ctypes
import platform

from meshloom.launch.environment import allocator_is_set

# Parameters of glibc's mallopt(3). What the first sets, no environment of ours can: glibc reads its own when
# the process starts.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = 32 << 20  # bytes; glibc takes no larger threshold, and gives larger blocks back at once


def keep_freed_memory() -> bool:
    """Whether the C library does, from now on and in all threads; not if it is another than glibc, or if the
    user has set its allocator."""
    if platform.libc_ver()[0] != "glibc" or allocator_is_set():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
