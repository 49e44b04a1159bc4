"""The parameters that a rank computes with: full, or in slices along dp that are gathered where they are used (zero=3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.exchange.zero_three import slices_of


class HeldParameters:
    """named: those that this rank holds. replicas: the ranks along dp, for messages that are not counted.

    in_programs: whether programs use them, not modules. slices: has slices of them, if this rank keeps no more; units: gathers these.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], exchange: Exchange, replicas: Group, *, in_programs: bool
    ) -> None:
        self.named, self._replicas, self._in_programs = named, replicas, in_programs
        self.slices = slices_of(exchange) if exchange.ownership.memory == "sliced" else None
        self.units = UnitAccess(self.slices.gathering, in_programs=in_programs) if self.slices else None

    def computing(self, kind: str, *, idle: bool) -> AbstractContextManager[None]:
        """As `Engine.computing`."""
        return self.units.computing(kind, idle=idle) if self.units else nullcontext()

    def kept(self) -> Mapping[str, Tensor]:
        """What this rank keeps of each, borrowed ones too."""
        if self.slices is None:
            return self.named
        return {each.name: each.data() for each in self.slices.each_slice(borrowed=True)}

    def apart(self, lent: Collection[str]) -> Mapping[str, Tensor]:
        """The same of what ranks along pp lend each other, with padding."""
        return self.slices.kept(lent) if self.slices else self.named

    def most(self, microbatches: int) -> int:
        """Where slices are gathered: microbatches of the replica that has most in this step, if they take actions together; else those of
        this one."""
        if not self._in_programs:
            return microbatches
        most = torch.tensor([microbatches])
        self._replicas.all_reduce(most, "max").wait()
        return int(most)
