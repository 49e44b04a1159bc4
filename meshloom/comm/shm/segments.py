"""Files in memory that several processes of one host map: anonymous where the system has such.

A rank creates an anonymous file (memfd) and publishes its process id and descriptor; the others open
/proc/PID/fd/DESCRIPTOR, as processes of one user may. Where that fails (no memfd, no /proc, hidden
processes), files have a name in /dev/shm until all ranks have opened them. In both cases only their user may
open them (mode 0600), and an opened file must be of this kind, user and size. Otherwise another user could
publish memory of his own, or some unrelated file of this user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from meshloom.core.errors import CollectiveError
from meshloom.core.units import format_bytes

PAGE = mmap.PAGESIZE
_NAME = "meshloom"  # of anonymous files, where the system lists them
# the size is fixed
_SEALS = (
    getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
)


class Files(ABC):
    """A way to share files in memory. Other processes know a file by its owner's process id and a number."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the files are, in words."""

    @abstractmethod
    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        """Create a file: its descriptor and number. backed: allocate its memory now, or `CollectiveError`."""

    @abstractmethod
    def open(self, process: int, number: int, num_bytes: int) -> int:
        """Open another process's file of that many bytes: its descriptor. Raises `OSError` if it does not
        exist, or is not what `create` creates for this user."""

    @abstractmethod
    def all_have_opened(self, number: int) -> None:
        """Note that no other process will open this file."""


class Anonymous(Files):
    """Anonymous files. `create` raises `OSError` where the system has none."""

    @property
    def where(self) -> str:
        return "memory"

    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _make_room(descriptor, num_bytes, backed, self.where)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, descriptor

    def open(self, process: int, number: int, num_bytes: int) -> int:
        path = f"/proc/{process}/fd/{number}"
        if os.stat(f"/proc/{process}").st_uid != os.geteuid():
            raise PermissionError(f"process {process} belongs to another user")
        # opening anything else could have side effects
        if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
            raise PermissionError(f"file {number} of process {process} is not shared memory")
        return _checked(os.open(path, os.O_RDWR | os.O_CLOEXEC), num_bytes, _SEALS)

    def all_have_opened(self, number: int) -> None:
        pass


class Named(Files):
    """Files with a name in a directory in memory, until all ranks have opened them."""

    def __init__(self, directory: Path | None = None) -> None:
        in_memory = Path("/dev/shm")
        self._directory = directory or (in_memory if in_memory.is_dir() else Path(tempfile.gettempdir()))
        self._remove_leftovers()

    @property
    def where(self) -> str:
        return str(self._directory)

    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        while True:
            number = secrets.randbits(62)  # cannot be guessed and taken by others
            path = self._path(os.getpid(), number)
            with suppress(FileExistsError):
                descriptor = os.open(path, flags, 0o600)
                break
        try:
            _make_room(descriptor, num_bytes, backed, self.where)
        except BaseException:
            path.unlink()
            raise
        return descriptor, number

    def open(self, process: int, number: int, num_bytes: int) -> int:
        return _checked(os.open(self._path(process, number), os.O_RDWR | os.O_NOFOLLOW), num_bytes)

    def all_have_opened(self, number: int) -> None:
        with suppress(FileNotFoundError):
            self._path(os.getpid(), number).unlink()

    def _path(self, process: int, number: int) -> Path:
        return self._directory / f"meshloom-{os.getuid()}-{process}-{number}"

    def _remove_leftovers(self) -> None:
        """Remove files of processes that were killed during a rendezvous."""
        for path in self._directory.glob(f"meshloom-{os.getuid()}-*"):
            found = re.fullmatch(r"meshloom-\d+-(\d+)-\d+", path.name)
            if found and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
                with suppress(OSError):
                    path.unlink()


def map_file(descriptor: int, num_bytes: int) -> Tensor:
    """The file's memory, uint8 [num_bytes], mapped while a tensor uses it. The descriptor may be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, PAGE)), dtype=torch.uint8)[:num_bytes]


def too_little(where: str, needed: int, free: int | None) -> CollectiveError:
    """The error of too little memory."""
    there = "the system has no more" if free is None else f"{format_bytes(free)} are free there"
    return CollectiveError(
        f"Ranks of one machine exchange tensors through files in {where}: {format_bytes(needed)} are needed, and {there}. "
        "Give it more (in a container: --shm-size), use smaller buckets or batches, or let the ranks use Gloo (--transport gloo)."
    )


def free_bytes(descriptor: int) -> int | None:
    """Bytes that are free where the file is; None if that is unlimited."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _make_room(descriptor: int, num_bytes: int, backed: bool, where: str) -> None:
    """Set the file's length, and allocate its memory if `backed`: touching a page that cannot be allocated
    later would kill the process."""
    length = max(num_bytes, PAGE)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, length)
        if backed and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, length)
    except OSError:
        free = free_bytes(descriptor)
        os.close(descriptor)
        raise too_little(where, length, free) from None


def _checked(descriptor: int, num_bytes: int, seals: int | None = None) -> int:
    """The descriptor of a file of this user alone, of the size for `num_bytes`, and with these seals. Closes
    any other and raises `PermissionError`."""
    try:
        found = os.fstat(descriptor)
        facts = stat.S_ISREG(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode), found.st_size
        if facts != (True, os.geteuid(), 0o600, max(num_bytes, PAGE)):
            raise PermissionError(
                f"what should be shared memory is a file of user {found.st_uid} with mode {facts[2]:04o} and {found.st_size} bytes; "
                f"user {os.geteuid()}, mode 0600 and {max(num_bytes, PAGE)} bytes were expected"
            )
        if seals is not None and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != seals:
            raise PermissionError("what should be shared memory can change its size")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
