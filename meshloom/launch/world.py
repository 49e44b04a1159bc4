"""The ranks of a mesh in one process, with the groups that they communicate in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import torch

from meshloom.comm.group import Group
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.rank_context import SliceGroups
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.turns import Turns
from meshloom.core.errors import PeerLostError
from meshloom.core.mesh import Axis, Mesh, MeshCoordinates
from meshloom.launch.devices import Kind
from meshloom.launch.failure import Frame, report_failure
from meshloom.launch.names import used_axes
from meshloom.machine.process_memory import peak_memory_bytes

# What a group is for: tensors along an axis, batch statistics along dp, slices of one copy and equal slices along
# dp; or control messages among all ranks, those of a replica, those along dp, those of one copy; or all ranks once
# more, for a thread that saves.
Use = Axis | Literal["statistics", "copy", "equals", "world", "team", "readers", "control", "saving"]
CARRIES_TENSORS = ("dp", "pp", "tp", "statistics", "copy", "equals")
ALONG_DP = ("dp", "statistics", "copy", "equals")
REDUCES = ("dp", "copy", "equals")  # gradients, on a ring if the plan says so


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """A rank that lives in this process.

    Its fields are those of `RankContext` (`comm/rank_context.py`).
    """

    rank: int
    place: MeshCoordinates
    device: torch.device
    groups: Mapping[Axis, RecordedGroup]
    statistics: RecordedGroup
    world: Group
    team: Group | None
    readers: Group
    slices: SliceGroups | None = None
    saving: Group | None = None
    activity: Activity = field(default_factory=Activity)

    def all_groups(self) -> list[Group]:
        """Everything that it communicates in."""
        parts = (self.slices.copy, self.slices.control, self.slices.equals) if self.slices else ()
        control = (self.statistics, self.world, self.readers, self.team, self.saving)
        found = (*self.groups.values(), *control, *parts)
        return [group for group in found if group is not None]

    def check_end(self) -> None:
        """Raises `PeerLostError` where a wait for another rank has failed, and the program has gone on to its end all the same."""
        if self.activity.now().waits:
            raise PeerLostError(
                "The script has caught that another rank was lost, and gone on to its end without it."
            )


def connect_rank(
    mesh: Mesh, rank: int, device: torch.device, connect: Callable[[Sequence[Sequence[int]], Use], Group],
    activity: Activity | None = None, *, saving: bool = False,
) -> LocalRank:  # fmt: skip
    """`rank` with all its groups, whatever they are made of.

    connect: makes a group of each of some sets of ranks, the same in the same order on all ranks, and returns
        the one that `rank` is in. saving: whether a thread saves beside training.
    """
    several = mesh.size > mesh.dp  # ranks in a replica
    activity, everyone = activity or Activity(), [tuple(range(mesh.size))]

    def recorded(members: Sequence[Sequence[int]], use: Use, axis: Axis | Literal[""] = "") -> RecordedGroup:
        return RecordedGroup(connect(members, use), axis, activity)

    world = recorded(everyone, "world")
    slices: SliceGroups | None = None
    if mesh.within:
        copies, equals = mesh.slice_groups()
        slices = SliceGroups(
            copy=recorded(copies, "copy", "dp"),
            control=recorded(copies, "control"),
            equals=recorded(equals, "equals", "dp"),
        )
    return LocalRank(
        rank=rank,
        place=mesh.place(rank),
        device=device,
        groups={axis: recorded(mesh.groups(axis), axis, axis) for axis in used_axes(mesh)},
        statistics=recorded(mesh.groups("dp"), "statistics", "dp"),
        world=world,
        team=recorded(mesh.teams(), "team") if several else None,
        readers=recorded(mesh.groups("dp"), "readers") if several else world,
        slices=slices,
        # waits of a thread do not delay this rank
        saving=connect(everyone, "saving") if saving else None,
        activity=activity,
    )


class World:
    """The ranks of a mesh, as seen by one process: a context manager that ends its groups.

    local: the ranks that live here: one in a rank process, all when simulated.
    kind, why: the devices, and the line that explains their choice. main: whether rank 0 lives here.
    turns: the threads of ranks that are simulated.
    end: ends its groups; whether this rank has come to its end well. left_by: given an error of this rank, the others that had come to their end where it
    says that one is lost: they are its cause. note_of: what a script's ranks add to an error. reached: the newest line of the script at which its ranks
    had to do with each other.
    """

    def __init__(
        self, mesh: Mesh, local: list[LocalRank], kind: Kind, why: str,
        left_by: Callable[[BaseException], Sequence[str]] = lambda _: (),
    ) -> None:  # fmt: skip
        self.mesh, self.local, self.main = mesh, local, local[0].rank == 0
        # each with a pool of threads of its own they would be slower, and not alike from run to run
        self.turns = Turns(kernels=1)
        self.kind: Kind = kind
        self.why = why
        self.left_by = left_by
        self.note_of: Callable[[BaseException], str | None] = lambda _: None
        self.reached: Frame | None = None
        self.end: Callable[[bool], None] | None = None

    def memory_bytes(self) -> int:
        """Peak memory of this process: of its GPU if its ranks are on one, else resident."""
        device = self.local[0].device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return peak_memory_bytes()

    def report(self, error: BaseException) -> int:
        """Report what has ended this rank; the exit code for it."""
        if note := self.note_of(error):
            error.add_note(note)
        return report_failure(error, self.mesh, self.left_by(error))

    def close(self) -> None:
        """Leave the other ranks after a successful run. A second call does nothing."""
        self._leave(well=True)

    def abort(self) -> None:
        """Leave immediately: pending operations with this rank fail on the others."""
        self._leave(well=False)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._leave(well=error is None)

    def _leave(self, *, well: bool) -> None:
        end, self.end = self.end, None
        self.turns.close()
        if end:
            end(well)
