"""Opens a replica's exchange: one of all parameters, or two of some each, where some have sparse gradients."""

from __future__ import annotations

from meshloom.core.exchanges import EXCHANGES
from meshloom.exchange.disjoint import Disjoint, OfSome, parts_of
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.exchange.sparse_gradients import SparseGradients
from meshloom.exchange.zero_three import slices_of


def open_exchange(setup: Setup) -> Exchange:
    """The plan's exchange: of dense gradients, and of sparse ones where there are some."""
    dense = setup.open()
    named = [(name, each) for name, each in setup.named if name in setup.sparse]
    if not named:
        return dense
    alone = setup.plan.dp == 1 or EXCHANGES[setup.plan.exchange].independent
    sliced = slices_of(dense)
    sparse = SparseGradients(
        named,
        None if alone else setup.group,
        dense.ownership,
        slices=[each for each in sliced.each_slice() if each.name in setup.sparse] if sliced else [],
        kept=setup.kept,
        sparse_only=setup.sparse_only,
        used_rows=setup.used_rows,
    )
    return Disjoint([OfSome(exchange=dense, named=setup.dense), OfSome(exchange=sparse, named=named)])


def notes_of(exchange: Exchange) -> list[str]:
    """For the user, before the first step."""
    return list(dict.fromkeys(note for each in parts_of(exchange, SparseGradients) for note in each.notes()))
