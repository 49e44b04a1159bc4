"""Opens a replica's exchange: one of all parameters, or one for each of several losses."""

from __future__ import annotations

from dataclasses import replace

from meshloom.core.losses.turns import OwnGradients
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.replica.exchanges.in_turn import InTurn


def open_exchange(setup: Setup, own: OwnGradients | None) -> Exchange:
    """The plan's exchange. own: of several losses; None: there is one.

    A single replica, and units of parameters that are gathered for whichever loss uses them (zero=3), need no
    exchange for each: they send what has a gradient, and that is what the loss of the turn trains.
    """
    if own is None:
        return setup.open()
    in_units = setup.plan.zero == 3 and not (setup.windows is not None and setup.may_share())
    if setup.plan.dp == 1 or in_units:
        return replace(setup, loss_of=own.number_of).open()
    inner: list[Exchange] = []
    by_loss = [
        [(name, each) for name, each in setup.named if own.number_of(name) == number]
        for number in range(own.num_losses)
    ]
    for named in by_loss:
        names = {name for name, _ in named}
        inner.append(
            replace(
                setup,
                named=named,
                frozen=() if inner else setup.frozen,
                sparse=names.intersection(setup.sparse),
                kept=names.intersection(setup.kept),
                sparse_only=names.intersection(setup.sparse_only),
            ).open()
        )
    return InTurn(inner, [[name for name, _ in named] for named in by_loss])
