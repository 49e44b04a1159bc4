"""Files in memory (memfd) that several processes of one host map.

A rank creates a file and publishes its process id and descriptor; the others open /proc/PID/fd/DESCRIPTOR, as processes of one
user may. Only their user may open them (mode 0600), and an opened file must be of this kind, user and size. Otherwise another user
could publish memory of his own, or some unrelated file of this user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import torch
from torch import Tensor

from meshloom.core.errors import CollectiveError
from meshloom.core.units import format_bytes

PAGE = mmap.PAGESIZE
_NAME = "meshloom"  # of files, where the system lists them
# the size is fixed
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_file(num_bytes: int, *, backed: bool) -> int:
    """Create a file: its descriptor. backed: allocate its memory now, or `CollectiveError`. Raises `OSError` where the system has
    none."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _make_room(descriptor, num_bytes, backed)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def open_file(process: int, number: int, num_bytes: int) -> int:
    """Open the file of that many bytes that is descriptor `number` of another process: a descriptor. Raises `OSError` if it does
    not exist, or is not what `create_file` creates for this user."""
    path = f"/proc/{process}/fd/{number}"
    if os.stat(f"/proc/{process}").st_uid != os.geteuid():
        raise PermissionError(f"process {process} belongs to another user")
    # opening anything else could have side effects
    if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
        raise PermissionError(f"file {number} of process {process} is not shared memory")
    return _checked(os.open(path, os.O_RDWR | os.O_CLOEXEC), num_bytes)


def map_file(descriptor: int, num_bytes: int) -> Tensor:
    """The file's memory, uint8 [num_bytes], mapped while a tensor uses it. The descriptor may be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, PAGE)), dtype=torch.uint8)[:num_bytes]


def too_little(needed: int) -> CollectiveError:
    """The error of too little memory."""
    return CollectiveError(
        f"Ranks of one machine exchange tensors through files in memory: {format_bytes(needed)} are needed, and the system has no more. "
        "Use smaller buckets or batches, or let the ranks use Gloo (--transport gloo)."
    )


def _make_room(descriptor: int, num_bytes: int, backed: bool) -> None:
    """Set the file's length, and allocate its memory if `backed`: touching a page that cannot be allocated
    later would kill the process."""
    length = max(num_bytes, PAGE)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, length)
        if backed:
            os.posix_fallocate(descriptor, 0, length)
    except OSError:
        os.close(descriptor)
        raise too_little(length) from None


def _checked(descriptor: int, num_bytes: int) -> int:
    """The descriptor of a file of this user alone, of the size for `num_bytes`, which cannot change. Closes
    any other and raises `PermissionError`."""
    try:
        found = os.fstat(descriptor)
        facts = stat.S_ISREG(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode), found.st_size
        if facts != (True, os.geteuid(), 0o600, max(num_bytes, PAGE)):
            raise PermissionError(
                f"what should be shared memory is a file of user {found.st_uid} with mode {facts[2]:04o} and {found.st_size} bytes; "
                f"user {os.geteuid()}, mode 0600 and {max(num_bytes, PAGE)} bytes were expected"
            )
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _SEALS:
            raise PermissionError("what should be shared memory can change its size")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
