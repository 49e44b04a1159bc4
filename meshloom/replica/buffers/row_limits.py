"""Rows of tables with `max_norm` that some chunk of a step has read, scaled in the weight before its update.

Forwards have scaled what they read (`limited_rows.py`). Which rows were read is united over the replicas, and each rank
scales what it holds of them, all, a shard or a slice, from the same values: the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.core.job import NamedParameters
from meshloom.exchange.exchange import Exchange
from meshloom.parameters.shards import Shards
from meshloom.program.operators.limited_rows import RowLimit
from meshloom.program.operators.used_rows import UsedRows
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class RowLimits:
    """limits: of tables of the whole model, by name. named: the trained parameters that this rank updates. used: the
    rows that this replica has read. Replicas that take local steps scale what they have read alone."""

    def __init__(
        self, limits: Mapping[str, RowLimit], named: NamedParameters, used: UsedRows, replicas: Group, exchange: Exchange, shards: Shards,
    ) -> None:  # fmt: skip
        self._limits, self._named, self._used = limits, dict(named), used
        self._replicas = replicas if replicas.size > 1 and not exchange.independent else None
        self._exchange, self._shards = exchange, shards
        self._sent = Traffic()

    def apply(self) -> Steps[None]:
        """After the chunks of a step. The number of waits is the same on all ranks."""
        if not self._limits:
            return
        if self._replicas is not None:
            work = self._replicas.all_reduce(self._used.flags, "max")
            self._sent += Traffic.along("dp", all_reduce=self._used.flags.nbytes)
            yield
            work.wait()
        for name, limit in self._limits.items():
            yield from self._scale(name, limit)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes so far."""
        return ExpectedBytes(so_far=self._sent)

    def _scale(self, name: str, limit: RowLimit) -> Steps[None]:
        used, parts = self._used.of(name), self._parts(name)
        assert used is not None
        power = limit.norm_type
        device = self._used.flags.device
        totals = torch.zeros(limit.rows, dtype=torch.float64, device=device)
        for part in parts:
            part.add_to(totals, power)
        groups: dict[str, Group | None] = {"tp": self._shards.group if name in self._shards.pieces else None}
        groups["dp"] = self._exchange.owners if self._exchange.only_slices else None
        for axis, group in groups.items():
            if group is not None:
                work = group.all_reduce(totals)
                self._sent += Traffic.along(axis, all_reduce=totals.nbytes)
                yield
                work.wait()
        scales = limit.scales(totals.pow(1.0 / power))
        for part in parts:
            part.scale(torch.where(used, scales, 1.0))

    def _parts(self, name: str) -> list[_Part]:
        """The elements of a table that this rank holds."""
        parameter = self._named.get(name)
        if parameter is None:
            return []
        pieces, device = self._shards.pieces.get(name), self._used.flags.device
        runs = pieces.held[self._shards.rank][0] if pieces else None
        rows = torch.arange(pieces.shape[0] if pieces else len(parameter), device=device)
        if runs is not None:
            rows = torch.cat([rows[:0], *(rows[start:stop] for start, stop in runs)])
        width = parameter.numel() // max(len(rows), 1)
        if self._exchange.only_slices:
            mine = [each for each in self._exchange.each_slice() if each.name == name]
            return [_Part(each.data(), rows, width, each.start) for each in mine]
        return [_Part(parameter.data.view(-1), rows, width, 0)]


@dataclass(frozen=True)
class _Part:
    """values: flat, from element `start` of the rows that the rank holds, each of `width` elements. rows: their numbers in the
    whole table."""

    values: Tensor
    rows: Tensor
    width: int
    start: int

    def add_to(self, totals: Tensor, power: float) -> None:
        """Add up powers of each row's elements, in the same order on every replica: GPUs add scattered values in any."""
        if not len(self.values):
            return
        before = self.start % self.width
        behind = -(before + len(self.values)) % self.width
        padded = F.pad(self.values.double().abs().pow(power), (before, behind))
        totals[self._touched] += padded.view(-1, self.width).sum(1)

    def scale(self, scales: Tensor) -> None:
        """scales: of all rows of the table."""
        if not len(self.values):
            return
        before = self.start % self.width
        each = scales[self._touched, None].expand(-1, self.width).reshape(-1)
        self.values.mul_(each[before : before + len(self.values)].to(self.values.dtype))

    @property
    def _touched(self) -> Tensor:
        """The rows of which it has elements, each once."""
        first, last = self.start // self.width, (self.start + len(self.values) - 1) // self.width
        return self.rows[first : last + 1]
