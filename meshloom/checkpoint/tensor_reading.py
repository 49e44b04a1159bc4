"""Reads the tensors of a safetensors file in any order, each byte once, and computes the whole file's
checksum from that.

The counterpart of `tensor_file.py`. The file is open only while it is read, because a checkpoint may have one
for each of a thousand ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshloom.checkpoint.checksums import joined
from meshloom.checkpoint.tensor_file import DTYPES, TensorEntry
from meshloom.core.errors import CheckpointError

_BLOCK = 2**20
NAMED_DTYPES = {text: dtype for dtype, text in DTYPES.items()}


class TensorReader:
    """A file of `size` bytes.

    entries: those of its header, by name; none if the header cannot be parsed, so that the file counts as
    damaged.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._blocks: dict[int, tuple[int, int]] = {}  # what was read: start -> stop, checksum
        self._starts: dict[str, int] = {}
        self.entries: Mapping[str, TensorEntry] = {}
        try:
            self.entries = self._header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError):
            # all that damaged text can lead to
            self._starts = {}

    def read(self, name: str, into: memoryview) -> None:
        """Reads the bytes of a tensor. Raises `EOFError` if the file ends early, and `CheckpointError` if it
        cannot be read."""
        self._read(self._starts[name], into)

    def checksum(self) -> int:
        """The checksum of the whole file; what was not read yet is read now, and discarded."""
        checksum, position = 0, 0
        buffer = memoryview(bytearray(_BLOCK))
        for start, (stop, theirs) in sorted([*self._blocks.items(), (self._size, (self._size, 0))]):
            while position < start:
                block = buffer[: min(_BLOCK, start - position)]
                self._fill(position, block)
                checksum = zlib.crc32(block, checksum)
                position += len(block)
            checksum = joined(checksum, theirs, stop - start)
            position = stop
        return checksum

    def _header(self) -> dict[str, TensorEntry]:
        length = bytearray(8)
        self._read(0, memoryview(length))
        size = int.from_bytes(length, "little")
        if size > self._size - 8:
            raise ValueError("it would not end within the file")
        text = bytearray(size)
        self._read(8, memoryview(text))
        found = parse_header(bytes(text), self._size)
        self._starts = {name: start for name, (_, start) in found.items()}
        return {name: entry for name, (entry, _) in found.items()}

    def _read(self, start: int, into: memoryview) -> None:
        if len(into):
            self._fill(start, into)
            self._blocks[start] = start + len(into), zlib.crc32(into)

    def _fill(self, start: int, into: memoryview) -> None:
        position = 0
        try:
            with self._path.open("rb", buffering=0) as file:  # nothing is read ahead
                file.seek(start)
                while position < len(into):
                    count = file.readinto(into[position:])
                    if not count:
                        raise EOFError(f"{self._path} ends before byte {start + len(into)}")
                    position += count
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror or error}.") from error


def parse_header(text: bytes, file_bytes: int) -> dict[str, tuple[TensorEntry, int]]:
    """The tensors that a file of `file_bytes` bytes has by the JSON of its header, and the byte at which each
    starts. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it cannot be."""
    header: dict[str, Any] = json.loads(text)
    first = 8 + len(text)
    found: dict[str, tuple[TensorEntry, int]] = {}
    for name, each in header.items():
        if name == "__metadata__":
            continue
        if each["dtype"] not in NAMED_DTYPES:
            raise ValueError(f"{name} is of dtype {each['dtype']}, which is not supported")
        entry = TensorEntry(name, tuple(torch.Size(each["shape"])), NAMED_DTYPES[each["dtype"]])
        start, stop = (first + offset for offset in each["data_offsets"])
        if stop - start != entry.num_bytes or not first <= start <= stop <= file_bytes:
            raise ValueError(f"{name} does not lie in the file")
        found[name] = entry, start
    return found


def empty_bytes(entry: TensorEntry) -> torch.Tensor:
    """An uninitialised uint8 tensor of the entry's bytes, aligned for any dtype."""
    return torch.empty(entry.num_bytes, dtype=torch.uint8)
