"""Opens the exchange that a plan asks for, as its entry in `core/exchanges.py` says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.windows import Windows
from meshloom.core.exchanges import COMPRESSIONS, EXCHANGES
from meshloom.core.plan import Plan
from meshloom.exchange.alone import Alone
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.sparse_gradients import WithSparse

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an exchange is opened with.

    named, frozen: what this rank holds of the trainable parameters, and of the others. group: the replicas.
    apart: as for `GradientBuckets`. windows: the group, if its ranks can have memory in common. may_share:
    whether they may have one copy of the parameters then.
    sparse: names of parameters with sparse gradients; kept, insisted: of these, as for `WithSparse`.
    """

    plan: Plan
    named: Named
    frozen: Named = ()
    group: Group
    apart: Collection[str] = ()
    windows: Windows | None = None
    may_share: Callable[[], bool] = lambda: False
    sparse: Collection[str] = ()
    kept: Collection[str] = ()
    insisted: Collection[str] = ()

    @property
    def dense(self) -> Named:
        """The parameters whose gradients are dense."""
        return [(name, each) for name, each in self.named if name not in self.sparse]

    @property
    def bucket_settings(self) -> dict[str, Any]:
        """Those of exchanges that put gradients into buckets."""
        return {"bucket_bytes": self.plan.bucket_bytes, "overlap": self.plan.overlap, "apart": self.apart}

    def alone(self) -> Exchange:
        """The exchange of a replica that agrees with itself alone."""
        return self._with_sparse(Alone(self.dense), None)

    def open(self) -> Exchange:
        """The plan's exchange."""
        if self.plan.dp == 1:
            return self.alone()
        entry = EXCHANGES[self.plan.exchange]
        if entry.independent:
            return resolve_name(entry.factory)(self)
        return self._with_sparse(resolve_name(entry.factory)(self) if self.dense else Alone([]), self.group)

    def reduction(self) -> Callable[[Group], Reduction]:
        """How the mean of a bucket is made, as the plan's `compress` says."""
        name, _, number = self.plan.compress.partition(":")
        entry = COMPRESSIONS[name]
        made = resolve_name(entry.factory)
        read = entry.number
        return (lambda group: made(group, read(number))) if read else made

    def _with_sparse(self, exchange: Exchange, group: Group | None) -> Exchange:
        if not self.sparse:
            return exchange
        sparse = [(name, each) for name, each in self.named if name in self.sparse]
        return WithSparse(exchange, sparse, group, kept=self.kept, insisted=self.insisted)
