"""Whether the copies of a save in the background fit into host memory. All ranks are on one host, and agree."""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.checkpoint.writing.host_copy import CopyMemory
from meshloom.checkpoint.writing.parallel import DividedState
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SaveRoom:
    """mine, copied: bytes of this rank's copy and of all. missing: why there is no room, as the end of a sentence; "": there is."""

    mine: int
    copied: int
    missing: str

    def sentence(self) -> str:
        """How checkpoints are written, for the user."""
        return (
            f"Checkpoints are written in the background, from a copy of the state in host memory: {_of_rank_0(self.copied, self.mine)}, "
            "kept from one to the next."
        )


def find_room(group: Group, divided: DividedState, memory: CopyMemory, *, again: int, free: int) -> SaveRoom:
    """Whether there is room for all ranks. Every rank of `group` calls it.

    memory: what this rank keeps for copies. again: bytes that this process is likely to take in the next steps.
    free: bytes of memory of the host.
    """
    mine = sum(part.nbytes for _, part in divided.parts)
    everyone = collect(group, [mine, memory.num_bytes, again, free])
    copied, kept, expected = (sum(each[i] for each in everyone) for i in range(3))
    missing = ""
    if copied - kept + expected > everyone[0][3]:
        missing = (
            f"a copy of its state, {_of_rank_0(copied, mine)}, does not fit in the {format_bytes(everyone[0][3])} of host memory that are "
            f"free, of which the next steps may take {format_bytes(expected)}"
        )
    return SaveRoom(mine=mine, copied=copied, missing=missing)


def _of_rank_0(everyone: int, mine: int) -> str:
    return f"{format_bytes(everyone)} ({format_bytes(mine)} of it on rank 0)"
