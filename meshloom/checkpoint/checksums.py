"""The CRC-32 of files whose bytes are read in any order, or by several ranks, combined from those of parts.

CRC-32 is the remainder of the bytes as a polynomial over GF(2); `first`, followed by n more bytes, is
multiplied by x^(8n).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from meshloom.core.errors import CheckpointError

Sum = tuple[str, int, int, int]  # file, start, stop, CRC-32
_DIVISOR = 0xEDB88320  # x^32 + ... + 1 without x^32; bit 31 is the coefficient of x^0
_ONE = 1 << 31
_BLOCK = 1 << 20  # bytes that are read at once


def sum_of_share(directory: Path, sizes: Mapping[str, int], rank: int, num_ranks: int) -> list[Sum]:
    """The checksums of one rank's share of the bytes of a directory's files. sizes: in bytes, by name."""
    return [
        (name, start, stop, sum_of(directory / name, start, stop))
        for name, start, stop in shares_of(sizes, rank, num_ranks)
    ]


def of_files(sums: Iterable[Sum]) -> dict[str, int]:
    """The checksum of each file, of those of all its bytes."""
    found: dict[str, int] = {}
    for name, start, stop, theirs in sorted(sums):
        found[name] = joined(found.get(name, 0), theirs, stop - start)
    return found


def shares_of(sizes: Mapping[str, int], rank: int, num_ranks: int) -> Iterator[tuple[str, int, int]]:
    """One rank's share of the bytes of files: file, start and stop of each part."""
    total = sum(sizes.values())
    first, last = total * rank // num_ranks, total * (rank + 1) // num_ranks
    position = 0
    for name, size in sizes.items():
        start, stop = max(first - position, 0), min(last - position, size)
        if start < stop:
            yield name, start, stop
        position += size


def sum_of(path: Path, start: int, stop: int) -> int:
    """The CRC-32 of some of a file's bytes. Raises `CheckpointError` if it ends earlier."""
    checksum, buffer = 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            block = memoryview(buffer)[: min(_BLOCK, stop - start)]
            count = file.readinto(block)
            if not count:
                raise CheckpointError(f"{path} ends before byte {stop}")
            checksum = zlib.crc32(block[:count], checksum)
            start += count
    return checksum


def joined(first: int, second: int, num_bytes: int) -> int:
    """The CRC-32 of two consecutive runs of bytes, of which the second has `num_bytes`.

    >>> import zlib
    >>> joined(zlib.crc32(b"mesh"), zlib.crc32(b"loom"), 4) == zlib.crc32(b"meshloom")
    True
    """
    power, factor = _ONE >> 8, _ONE  # x^8, and 1
    while num_bytes:
        if num_bytes & 1:
            factor = _product(factor, power)
        power = _product(power, power)
        num_bytes >>= 1
    return _product(first, factor) ^ second


def _product(left: int, right: int) -> int:
    """The product of two remainders, as a remainder."""
    total = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            total ^= right
        right = right >> 1 ^ (_DIVISOR if right & 1 else 0)
    return total
