"""Opens the exchange that a plan names, by its entry in `core/exchanges.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.rank_context import SliceGroups
from meshloom.comm.windows import Windows
from meshloom.core.exchanges import EXCHANGES, REDUCED_AS, compression_of
from meshloom.core.plan import Plan
from meshloom.exchange.alone import Alone
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.units.unit_slices import UnitParameters
from meshloom.parameters.unfilled_model import UnfilledModel

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an exchange is opened with.

    named, frozen: the trainable and the other parameters that this rank holds. group: the replicas.
    replicated: as for `GradientBuckets`. late: names of parameters whose gradients are complete at the end of
    a step only. windows: the group, if its ranks can share memory. may_share: whether they may then share one
    copy of the parameters. units: of all parameters, for zero=3. control: the replicas' group for messages
    that are not counted. slices: parts of the replicas, under zero_within. lent: name of what several ranks along pp hold -> whether this one updates it. sparse:
    names of the parameters with sparse gradients; kept, sparse_only, used_rows: of these, as for `SparseGradients`.
    """

    plan: Plan
    named: Named
    frozen: Named = ()
    group: Group
    replicated: Collection[str] = ()
    late: Collection[str] = ()
    windows: Windows | None = None
    may_share: Callable[[], bool] = lambda: False
    units: Callable[[], Sequence[UnitParameters]] = tuple[UnitParameters]
    unfilled: UnfilledModel | None = None
    control: Group | None = None
    slices: SliceGroups | None = None
    lent: Mapping[str, bool] = field(default_factory=dict[str, bool])
    sparse: Collection[str] = ()
    kept: Collection[str] = ()
    sparse_only: Collection[str] = ()
    used_rows: Callable[[str], Tensor | None] = lambda name: None

    @property
    def dense(self) -> Named:
        """The parameters with dense gradients."""
        return [(name, each) for name, each in self.named if name not in self.sparse]

    @property
    def bucket_settings(self) -> dict[str, Any]:
        """The arguments of exchanges that put gradients into buckets."""
        return {
            "bucket_bytes": self.plan.bucket_bytes,
            "overlap": self.plan.overlap,
            "replicated": self.replicated,
        }

    @property
    def travels(self) -> torch.dtype | None:
        """What gradients travel as; None: their own dtype."""
        name = REDUCED_AS[self.plan.reduce]
        return getattr(torch, name) if name else None

    def open(self) -> Exchange:
        """The plan's exchange of these. Ranks that own nothing may borrow parameters or have frozen ones."""
        plan, entry = self.plan, EXCHANGES[self.plan.exchange]
        sends = (
            plan.dp > 1
            and entry.synchronous
            and (entry.independent or self.dense or (plan.zero == 3 and self.units()))
        )
        if not sends or (self.sparse and plan.zero < 3) or not entry.fills:
            self.fill_parameters()
        return resolve_name(entry.factory)(self) if sends else Alone(self.dense)

    def fill_parameters(self) -> None:
        """Gives memory to parameters that have none, for exchanges that keep them whole on every rank; their values come
        once all ranks have opened theirs."""
        if self.unfilled and self.unfilled.lacks_parameters:
            self.unfilled.fill_parameters()

    def reduction(self) -> Callable[[Group], Reduction]:
        """The reduction of a bucket that the plan's `compress` names."""
        entry, number = compression_of(self.plan)
        made = resolve_name(entry.factory)
        read = entry.number
        return (lambda group: made(group, read(number))) if read else made
