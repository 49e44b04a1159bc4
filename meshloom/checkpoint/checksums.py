"""The CRC-32 of bytes that are read in any order, combined from those of parts.

CRC-32 is the remainder of the bytes as a polynomial over GF(2); `first`, followed by n more bytes, is
multiplied by x^(8n).
"""

from __future__ import annotations

_DIVISOR = 0xEDB88320  # x^32 + ... + 1 without x^32; bit 31 is the coefficient of x^0
_ONE = 1 << 31


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
