"""The contract of what a rank has in a run: its coordinates, device, groups and activity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from meshloom.comm.group import Group
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.recording import RecordedGroup
from meshloom.core.mesh import Axis, MeshCoordinates


@dataclass(frozen=True, kw_only=True)
class SliceGroups:
    """The ranks along dp under zero_within. copy: those that keep slices of the same copy as this one; control:
    these for messages that are not counted; equals: those that keep the same slices."""

    copy: RecordedGroup
    control: Group
    equals: RecordedGroup


class RankContext(Protocol):
    """One rank of a run, as the code that runs on it sees it.

    rank: global number. place: its coordinates on the mesh.
    groups: for each axis, the ranks along it; their traffic is counted as the plan's.
    statistics: the ranks along dp once more, for collectives inside forward and backward.
    world: all ranks, CPU tensors; for decisions, reports and checkpoints, whose traffic is not counted.
    team: likewise, this replica's ranks in order of pp, then of tp; None if it is one rank.
    readers: likewise, the ranks along dp. slices: parts of these, under zero_within.
    saving: all ranks once more, used by the thread alone that writes checkpoints beside training; None: none does.
    activity: where the rank notes what it is doing.
    """

    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> MeshCoordinates: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def groups(self) -> Mapping[Axis, RecordedGroup]: ...
    @property
    def statistics(self) -> RecordedGroup: ...
    @property
    def world(self) -> Group: ...
    @property
    def team(self) -> Group | None: ...
    @property
    def readers(self) -> Group: ...
    @property
    def slices(self) -> SliceGroups | None: ...
    @property
    def saving(self) -> Group | None: ...
    @property
    def activity(self) -> Activity: ...
