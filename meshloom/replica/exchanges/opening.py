"""Opens a replica's exchange: one of all parameters, or several of some each, where some have sparse
gradients or there are several losses."""

from __future__ import annotations

from dataclasses import replace

from meshloom.core.exchanges import EXCHANGES
from meshloom.core.losses.turns import OwnGradients
from meshloom.exchange.disjoint import Disjoint, OfSome, parts_of
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.exchange.sparse_gradients import SparseGradients
from meshloom.exchange.zero_three import slices_of


def open_exchange(setup: Setup, own: OwnGradients | None) -> Exchange:
    """The plan's exchange. own: of several losses; None: there is one.

    A single replica, and units of parameters that are gathered for whichever loss uses them (zero=3), need no
    exchange for each: they send what has a gradient, and that is what the loss of the turn trains.
    """
    in_units = setup.plan.zero == 3 and not (setup.windows is not None and setup.may_share())
    parts: list[OfSome] = []
    if own is None:
        parts = _parts(setup)
    elif setup.plan.dp == 1 or in_units:
        parts = _parts(replace(setup, loss_of=own.number_of))
    else:
        for number in range(own.num_losses):
            named = [(name, each) for name, each in setup.named if own.number_of(name) == number]
            frozen = () if number else setup.frozen
            parts += _parts(replace(setup, named=named, frozen=frozen), number)
    return parts[0].exchange if len(parts) == 1 else Disjoint(parts)


def _parts(setup: Setup, loss: int | None = None) -> list[OfSome]:
    """The exchange of dense gradients, and that of sparse ones where there are some."""
    dense = setup.open()
    parts = [OfSome(exchange=dense, named=setup.dense, loss=loss)]
    named = [(name, each) for name, each in setup.named if name in setup.sparse]
    if named:
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
        parts.append(OfSome(exchange=sparse, named=named, loss=loss))
    return parts


def notes_of(exchange: Exchange) -> list[str]:
    """For the user, before the first step."""
    return list(dict.fromkeys(note for each in parts_of(exchange, SparseGradients) for note in each.notes()))
