"""Memory that several processes of one host map: files without a name where the system has them, which nothing can leave behind.

A rank makes a file in memory (memfd) and tells its process and descriptor; the others open it as /proc/PID/fd/DESCRIPTOR, as
processes of one user may. Where that does not work (no memfd, no /proc, hidden processes) files have a name in /dev/shm for the moment in which
all ranks open them. Either way nobody but their user may open them (mode 0600).
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from meshloom.errors import CollectiveError

PAGE = mmap.PAGESIZE


class Files(ABC):
    """A way to share files in memory. A file is known to others by its owner's process and a number."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where they lie, in words."""

    @abstractmethod
    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        """Descriptor and number of a new file. backed: its memory is taken now. Raises `CollectiveError` if there is too little."""

    @abstractmethod
    def open(self, process: int, number: int) -> int:
        """Descriptor of another process's file. Raises `OSError`."""

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
        descriptor = os.memfd_create("meshloom")
        _make_room(descriptor, num_bytes, backed, self.where)
        return descriptor, descriptor

    def open(self, process: int, number: int) -> int:
        return os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)

    def all_have_opened(self, number: int) -> None:
        pass


class Named(Files):
    """Files in a directory in memory, until all have opened them."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or (Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir()))
        self._numbers = count()
        self._remove_leftovers()

    @property
    def where(self) -> str:
        return str(self._directory)

    def create(self, num_bytes: int, *, backed: bool) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        while True:
            number = next(self._numbers)
            path = self._path(os.getpid(), number)
            with suppress(FileExistsError):  # another group of this process has it
                descriptor = os.open(path, flags, 0o600)
                break
        try:
            _make_room(descriptor, num_bytes, backed, self.where)
        except BaseException:
            path.unlink()
            raise
        return descriptor, number

    def open(self, process: int, number: int) -> int:
        return os.open(self._path(process, number), os.O_RDWR)

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
    """The file's memory as bytes (uint8 [num_bytes]); it stays mapped for as long as a tensor uses it. The descriptor may be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, PAGE)), dtype=torch.uint8)[:num_bytes]


def too_little(where: str, needed: int, free: int | None) -> CollectiveError:
    """The error of a place that is too small."""
    there = f", and {_mebibytes(free)} are free there" if free is not None else ", and the system has no more"
    return CollectiveError(
        f"Ranks of one machine exchange tensors through files in {where}: {_mebibytes(needed)} are needed{there}. "
        "Give it more (in a container: --shm-size), use smaller buckets or batches, or let the ranks talk over Gloo (--transport gloo)."
    )


def free_bytes(descriptor: int) -> int | None:
    """What is left where the file lies; None where that is not limited."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _make_room(descriptor: int, num_bytes: int, backed: bool, where: str) -> None:
    """The file gets its length, and its memory if `backed`: a page that is missing when it is touched would kill the process."""
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


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.4g} MiB"
