"""Whether a save in the background has room: host memory for what is copied, and disk for what updates write while
lent state is read. All ranks are on one host, and agree."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from meshloom.checkpoint.lending import Lender
from meshloom.checkpoint.writing.host_copy import CopyMemory
from meshloom.checkpoint.writing.parallel import DividedState
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SaveRoom:
    """copied, lent, disk: bytes of this rank and of all; disk: more of it than before. missing: why there is no room, as
    the end of a sentence; "": there is."""

    copied: tuple[int, int]
    lent: tuple[int, int]
    disk: tuple[int, int]
    missing: str = ""

    def sentence(self) -> str:
        """How checkpoints are written, for the user."""
        copied, lent = _of_rank_0(self.copied), _of_rank_0(self.lent)
        what = "the state" if not self.lent[1] else "what is not offloaded"
        also = (
            f" Offloaded optimizer state, {lent}, is not copied: it is read where it is, while updates write to {_of_rank_0(self.disk)} more of the disk, "
            "which are kept, too."
            if self.lent[1]
            else ""
        )
        return (
            f"Checkpoints are written in the background, from a copy of {what} in host memory: {copied}, "
            f"kept from one to the next.{also}"
        )


def find_room(
    group: Group, divided: DividedState, memory: CopyMemory, lender: Lender | None, *, out: Path, again: int, free: int
) -> SaveRoom:  # fmt: skip
    """Reserves the disk that it takes, if there is room for all ranks. Every rank of `group` calls it.

    memory: what this rank keeps for copies. again: bytes that this process is likely to take in the next steps.
    free: bytes of memory of the host. out: where the checkpoint is written.
    """
    lent = [part for _, part in divided.parts if lender and lender.lends(part)]
    num_lent = sum(each.nbytes for each in lent)
    copied = sum(part.nbytes for _, part in divided.parts) - num_lent
    needed = lender.missing_bytes(lent) if lender else 0
    disk = _disk_of(lender.directory) if lender and needed else None
    mine = [copied, num_lent, memory.num_bytes, again, free, needed, disk, _disk_of(out)]
    everyone = collect(group, mine)
    all_copied, all_lent, kept, expected = (sum(each[i] for each in everyone) for i in range(4))
    disk_of_all = sum(each[5] for each in everyone)
    found = SaveRoom(copied=(copied, all_copied), lent=(num_lent, all_lent), disk=(needed, disk_of_all))
    if all_copied - kept + expected > everyone[0][4]:
        what = "its state" if not all_lent else "what is not offloaded of its state"
        missing = (
            f"a copy of {what}, {_of_rank_0(found.copied)}, does not fit in the {format_bytes(everyone[0][4])} of host memory that are "
            f"free, of which the next steps may take {format_bytes(expected)}"
        )
        return replace(found, missing=missing)
    missing = _missing_disk([each[5:] for each in everyone], everyone[0][7], divided.layout.tensor_bytes)
    if disk_of_all and not missing:
        missing = _reserve(group, lender, needed)
    return replace(found, missing=missing)


def _missing_disk(everyone: list[list[object]], out: list[object], checkpoint: int) -> str:
    """Of the disks of all ranks; the sentence of the first that has too little."""
    needs: dict[object, int] = {}
    facts: dict[object, tuple[int, str]] = {}
    for needed, disk, _ in everyone:
        if isinstance(disk, list) and isinstance(needed, int):
            device, free, directory = disk
            needs[device] = needs.get(device, 0) + needed
            facts[device] = free, directory
    for device, needed in needs.items():
        free, directory = facts[device]
        also = checkpoint if device == out[0] else 0
        if needed + also > free:
            taken = f", of which the checkpoint takes {format_bytes(also)}" if also else ""
            return (
                f"meanwhile, updates would write the offloaded optimizer state to {format_bytes(needed)} more of the disk of {directory}, and "
                f"{format_bytes(free)} are free there{taken}"
            )
    return ""


def _reserve(group: Group, lender: Lender | None, needed: int) -> str:
    """On all ranks or on none; why it could not be done."""
    problem = ""
    try:
        if lender and needed:
            lender.reserve(needed)
    except PlanError as error:
        problem = str(error)
    problems = collect(group, problem)
    first = next((each for each in problems if each), "")
    if first and lender and needed and not problem:
        lender.take_back()
    return first and f"no more disk could be reserved ({first})"


def _disk_of(path: Path) -> list[object]:
    """The device of a directory, or of what is there above it, its free bytes, and the directory."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    return [there.stat().st_dev, shutil.disk_usage(there).free, str(path)]


def _of_rank_0(num_bytes: tuple[int, int]) -> str:
    mine, everyone = num_bytes
    return f"{format_bytes(everyone)} ({format_bytes(mine)} of it on rank 0)"
