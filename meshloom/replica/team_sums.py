"""All-reduces over the ranks of one replica, and the bytes that they and its programs send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.core.mesh import Axis
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class TeamSums:
    """Over the groups along pp and tp; None: size 1."""

    def __init__(self, pp: Group | None, tp: Group | None) -> None:
        self._groups: dict[Axis, Group | None] = {"pp": pp, "tp": tp}
        self._sent: dict[Axis, Counter[str]] = {"pp": Counter(), "tp": Counter()}

    def add_up(self, axis: Axis, sums: Tensor) -> Steps[None]:
        """Sum in place."""
        group = self._groups[axis]
        if group is None or group.size == 1:
            return
        work = group.all_reduce(sums)
        self._sent[axis]["all_reduce"] += sums.nbytes
        yield
        work.wait()

    def union(self, flags: Tensor) -> Tensor:
        """Logical or of flags over tp, in place."""
        if (group := self._groups["tp"]) is not None:
            self._sent["tp"]["all_reduce"] += flags.nbytes
            group.all_reduce(flags).wait()
        return flags

    def count(self, sent: Mapping[Axis, Mapping[str, int]]) -> None:
        """Add bytes that programs sent, by kind of operation."""
        for axis, kinds in sent.items():
            self._sent[axis].update(kinds)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes so far."""
        return ExpectedBytes(so_far=Traffic({**self._sent}))
