"""Where a replica's rank sits, as it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from meshloom.comm.group import Group
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.recording import RecordedGroup
from meshloom.core.mesh import Axis, MeshCoordinates


class Seat(Protocol):
    """Where a replica sits: its number and coordinates, its device, and the groups it talks in."""

    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> MeshCoordinates: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def groups(self) -> Mapping[Axis, RecordedGroup]: ...
    @property
    # the ranks along dp again; for what is exchanged inside forward and backward
    def statistics(self) -> RecordedGroup: ...
    @property
    # all ranks, CPU tensors; for decisions, reports and checkpoints, not counted as traffic of the plan
    def world(self) -> Group: ...
    @property
    # this replica's ranks in order of pp, then of tp, likewise, if there are several
    def team(self) -> Group | None: ...
    @property
    def readers(self) -> Group: ...  # the ranks along dp, likewise
    @property
    def activity(self) -> Activity: ...  # where the rank writes what it is doing
