"""How fast a disk reads and writes in turns, as the state of an offloaded optimizer is."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from meshloom.machine.file_system import keeps_in_memory

PIECE = 16 * 2**20
MOST = 32  # pieces
SECONDS = 0.7  # about, for writing and for reading


def measure_disk(directory: Path) -> float:
    """Bytes per second of the disk of `directory`, half of them read and half written, in about 1.5 s; 0.0 if it keeps its
    files in memory, or has no room. What was written is taken from the page cache before it is read."""
    if keeps_in_memory(directory):
        return 0.0
    content = os.urandom(PIECE)  # some disks store zeros for nothing
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            descriptor, written, read = file.fileno(), 0, 0
            began = time.perf_counter()
            while written < MOST * PIECE and time.perf_counter() - began < SECONDS:
                written += os.pwrite(descriptor, content, written)
                os.fsync(descriptor)
            writing = (time.perf_counter() - began) / written
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while read < written and time.perf_counter() - began < SECONDS:
                read += len(os.pread(descriptor, PIECE, read))
            reading = (time.perf_counter() - began) / read
            return 2 / (reading + writing)
    except OSError:
        return 0.0
