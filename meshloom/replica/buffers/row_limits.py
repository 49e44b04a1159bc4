"""Rows of tables with `max_norm` that some chunk of a step has read, scaled in the weight before its update.

Forwards have scaled what they read (`limited_rows.py`). Which rows were read is united over the replicas, and each rank
scales what it holds of them, all, a shard or a slice, from the same values: the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
        for values, rows in parts:
            totals.index_add_(0, rows, values.double().abs().pow(power))
        groups: dict[str, Group | None] = {"tp": self._shards.group if name in self._shards.pieces else None}
        groups["dp"] = self._exchange.owners if self._exchange.only_slices else None
        for axis, group in groups.items():
            if group is not None:
                work = group.all_reduce(totals)
                self._sent += Traffic.along(axis, all_reduce=totals.nbytes)
                yield
                work.wait()
        scales = limit.scales(totals.pow(1.0 / power))
        for values, rows in parts:
            values.mul_(torch.where(used, scales, 1.0)[rows].to(values.dtype))

    def _parts(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """The elements of a table that this rank holds, flat, and the row of each."""
        parameter = self._named.get(name)
        if parameter is None:
            return []
        pieces, device = self._shards.pieces.get(name), self._used.flags.device
        runs = pieces.held[self._shards.rank][0] if pieces else None
        rows = torch.arange(pieces.shape[0] if pieces else len(parameter), device=device)
        if runs is not None:
            rows = torch.cat([rows[:0], *(rows[start:stop] for start, stop in runs)])
        row_of = rows[:, None].expand(parameter.shape).reshape(-1)
        if self._exchange.only_slices:
            mine = [each for each in self._exchange.each_slice() if each.name == name]
            return [(each.data(), row_of[each.start : each.stop]) for each in mine]
        return [(parameter.data.view(-1), row_of)]
