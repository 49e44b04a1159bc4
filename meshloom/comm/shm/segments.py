"""Memory that several processes of one host map: files without a name where the system has them, which
nothing can leave behind.

A rank makes a file in memory (memfd) and tells its process and descriptor; the others open it as
/proc/PID/fd/DESCRIPTOR, as
processes of one user may. Where that does not work (no memfd, no /proc, hidden processes) files have a name
in /dev/shm for the moment in which all ranks open them. Either way nobody but their user may open them (mode
0600), and what is opened must be such a file, of
the same user and of the expected size: otherwise another user, who may say anything, could put his own memory
there, or a file of this user's that is something else.
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
_NAME = "meshloom"  # of files without one, where the system shows them
# the size stays
_SEALS = (
    getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
)


class Files(ABC):
    """A way to share files in memory. A file is known to others by its owner's process and a number."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where they lie, in words."""

    @abstractmethod
    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        """Descriptor and number of a new file. backed: its memory is taken now. Raises `CollectiveError` if
        there is too little."""

    @abstractmethod
    def open(self, process: int, number: int, num_bytes: int) -> int:
        """Descriptor of another process's file of that many bytes. Raises `OSError` if it is not there, or is
        not what `create` makes for this user."""

    @abstractmethod
    def all_have_opened(self, number: int) -> None:
        """Nobody will open this file any more."""


class Anonymous(Files):
    """Files without a name. `create` raises `OSError` where there are none."""

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
        # nothing else is opened: that alone may have effects
        if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
            raise PermissionError(f"file {number} of process {process} is not shared memory")
        return _checked(os.open(path, os.O_RDWR | os.O_CLOEXEC), num_bytes, _SEALS)

    def all_have_opened(self, number: int) -> None:
        pass


class Named(Files):
    """Files in a directory in memory, until all have opened them."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or (
            Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        )
        self._remove_leftovers()

    @property
    def where(self) -> str:
        return str(self._directory)

    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        while True:
            number = secrets.randbits(62)  # so that nobody can have taken it
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
        """Of processes that were killed while they met."""
        for path in self._directory.glob(f"meshloom-{os.getuid()}-*"):
            found = re.fullmatch(r"meshloom-\d+-(\d+)-\d+", path.name)
            if found and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
                with suppress(OSError):
                    path.unlink()


def map_file(descriptor: int, num_bytes: int) -> Tensor:
    """The file's memory as bytes (uint8 [num_bytes]); it stays mapped for as long as a tensor uses it. The
    descriptor may be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, PAGE)), dtype=torch.uint8)[:num_bytes]


def too_little(where: str, needed: int, free: int | None) -> CollectiveError:
    """The error of a place that is too small."""
    there = (
        f", and {format_bytes(free)} are free there" if free is not None else ", and the system has no more"
    )
    return CollectiveError(
        f"Ranks of one machine exchange tensors through files in {where}: {format_bytes(needed)} are needed{there}. "
        "Give it more (in a container: --shm-size), use smaller buckets or batches, or let the ranks talk over Gloo (--transport gloo)."
    )


def free_bytes(descriptor: int) -> int | None:
    """What is left where the file lies; None where that is not limited."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _make_room(descriptor: int, num_bytes: int, backed: bool, where: str) -> None:
    """The file gets its length, and its memory if `backed`: a page that is missing when it is touched would
    kill the process."""
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
    """The descriptor, if it is a file for this user alone, of the size for `num_bytes`, and with these seals.
    Otherwise it is closed: `PermissionError`."""
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
