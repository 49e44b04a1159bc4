"""Flags on the device that say which parameters were used: set, and read where they must be, without the host waiting."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def set_flags(flags: Tensor, arrived: Sequence[bool]) -> None:
    """Fills `flags` [n], on any device, with ones and zeros."""
    flags.fill_(1)
    for number, is_there in enumerate(arrived):
        if not is_there:
            flags[number] = 0


def used_anywhere(arrived: list[bool], flags: Tensor) -> list[bool]:
    """Whether each was used on some rank. arrived: whether on this one. flags [n]: over all ranks, with other numbers
    than 0 where one has used it; they are read, and waited for, only if something has not arrived here."""
    return arrived if all(arrived) else [bool(each) for each in flags.tolist()]
