"""Buffers to which some chunk gave another shape: each becomes what the last chunk that changed it made of it, on every
replica. Replicas may have different shapes, so they exchange these first, and then values of the largest length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.core.errors import TrainingError
from meshloom.replica.buffers.recurrence import flat, unflat
from meshloom.replica.buffers.tracked_buffer import TrackedBuffer, num_reals

MOST_DIMS = 8
_ROW = 2 + MOST_DIMS  # whether it changed, its number of dims, and these


class ReshapedBuffers:
    """Those of one step. Raises `TrainingError` for a shape of more than `MOST_DIMS` dims."""

    def __init__(self, buffers: Sequence[TrackedBuffer]) -> None:
        self._buffers = buffers
        for each in buffers:
            if each.latest is not None and each.latest.ndim > MOST_DIMS:
                raise TrainingError(
                    f"The forward gives buffer {each.name} a shape of {each.latest.ndim} dims, and at most {MOST_DIMS} are supported."
                )

    def __len__(self) -> int:
        return len(self._buffers)

    def shapes(self, device: torch.device) -> Tensor:
        """What this replica's chunks made of them, int64 [buffers * _ROW]."""
        rows: list[int] = []
        for each in self._buffers:
            row = [] if each.latest is None else [1, each.latest.ndim, *each.latest.shape]
            rows += row + [0] * (_ROW - len(row))
        return torch.tensor(rows, device=device)

    def values(self, shapes: Tensor) -> Tensor:
        """This replica's values, as bits in int64, in as much room as the largest of any replica takes. shapes:
        [replicas, buffers * _ROW]."""
        parts: list[Tensor] = []
        for buffer, room in zip(self._buffers, self._rooms(shapes), strict=True):
            mine = flat(buffer.start[:0] if buffer.latest is None else buffer.latest)
            parts.append(torch.cat([mine, mine.new_zeros(room - len(mine))]).view(torch.int64))
        return torch.cat(parts)

    def put(self, shapes: Tensor, values: Tensor) -> None:
        """Take those of the last replica that changed them. values: [replicas, ...]."""
        at = 0
        for number, (buffer, room) in enumerate(zip(self._buffers, self._rooms(shapes), strict=True)):
            rows = shapes.view(len(shapes), -1, _ROW)[:, number].tolist()
            last = max(rank for rank, row in enumerate(rows) if row[0])
            made = buffer.start.new_empty(rows[last][2 : 2 + rows[last][1]])
            part = values[last, at : at + num_reals(made)].view(flat(made).dtype)
            buffer.put(unflat(part, made))
            at += room

    def _rooms(self, shapes: Tensor) -> list[int]:
        """Numbers that each buffer takes."""
        rows = shapes.view(len(shapes), -1, _ROW)
        elements = [
            max(math.prod(row[2 : 2 + row[1]]) if row[0] else 0 for row in rows[:, number].tolist())
            for number in range(len(self._buffers))
        ]
        return [
            each * (2 if buffer.start.is_complex() else 1)
            for each, buffer in zip(elements, self._buffers, strict=True)
        ]
