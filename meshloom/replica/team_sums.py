"""What the ranks of one replica tell each other besides their programs: sums, and gradients that several of them compute; and
the bytes that all of it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.mesh import Axis
from meshloom.exchange.buckets.buckets import bucket_lengths
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

_FLAT_BYTES = 32 * 2**20


class TeamSums:
    """Over the groups along pp and tp; None: size 1."""

    def __init__(self, pp: Group | None, tp: Group | None) -> None:
        self._groups: dict[Axis, Group | None] = {"pp": pp, "tp": tp}
        self._sent: dict[Axis, Counter[str]] = {"pp": Counter(), "tp": Counter()}

    def add_up(self, axis: Axis, sums: Tensor) -> None:
        """Sum in place."""
        group = self._groups[axis]
        if group is None or group.size == 1:
            return
        work = group.all_reduce(sums)
        self._sent[axis]["all_reduce"] += sums.nbytes
        work.wait()

    def alike(self, gradients: Sequence[Tensor | None]) -> None:
        """Those of the first rank along tp, in place, on each of them. All have computed the same ones, up to rounding; None:
        unused."""
        group = self._groups["tp"]
        if group is None or group.size == 1:
            return
        for some in _flat_parts([_values(each) for each in gradients if each is not None]):
            flat = torch.cat([each.reshape(-1) for each in some])
            work = group.broadcast(flat, 0)
            self._sent["tp"]["broadcast"] += flat.nbytes
            work.wait()
            for each, value in zip(some, flat.split([each.numel() for each in some]), strict=True):
                each.copy_(value.view_as(each))

    def count(self, sent: Mapping[Axis, Mapping[str, int]]) -> None:
        """Add bytes that programs sent, by kind of operation."""
        for axis, kinds in sent.items():
            self._sent[axis].update(kinds)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes so far."""
        return ExpectedBytes(so_far=Traffic({**self._sent}))


def _values(gradient: Tensor) -> Tensor:
    """What of it is rounded: of a sparse one the rows, in the order of their indices."""
    return gradient._values() if gradient.is_sparse else gradient


def _flat_parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that are sent together."""
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        ends = accumulate(bucket_lengths([each.nbytes for each in alike], _FLAT_BYTES), initial=0)
        yield from (alike[start:stop] for start, stop in pairwise(ends))
