"""The registry of exchanges: every way in which replicas can agree, as an entry of plain values, and the
checks of a plan's settings that follow from it.

An exchange is a file in `exchange/` and its entry here. The entry names the function that opens it, since
this room imports none of those above it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshloom.core.errors import PlanError


class ExchangeSettings(Protocol):
    """What is looked at here of a plan."""

    @property
    def dp(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def sync_batch_norm(self) -> bool: ...
    @property
    def exchange(self) -> str: ...
    @property
    def servers(self) -> int: ...
    @property
    def staleness(self) -> int | None: ...
    @property
    def rate_by_age(self) -> bool: ...
    @property
    def local_steps(self) -> int: ...
    @property
    def outer_learning_rate(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...
    @property
    def compress(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ExchangeEntry:
    """An exchange that a plan can name.

    factory: module and name of what opens it, given a `Setup` (`exchange/registry.py`); "": it is no step
    that replicas take together (`asynchronous/`). What it is predicted to send is said by what is opened.
    agreement: how replicas agree, as the end of a sentence.
    settings: of a plan that are for it; a plan of another exchange may not set them.
    algorithm: whether it is the all-reduce by the algorithm of its name.
    sums: whether every replica gets the sum of all gradients, so that gradients can be compressed.
    independent: whether replicas take local steps, each from its own parameters.
    no_zero: why zero=1 does not go with it, and what to do, as the end of a sentence; "": it does.
    breaks_promise: the setting of a plan because of which it need not equal one device, with its value; "" if
        it promises to.
    """

    factory: str
    agreement: str = "they add up their gradients"
    settings: tuple[str, ...] = ()
    algorithm: bool = False
    sums: bool = False
    independent: bool = False
    no_zero: str = ""
    breaks_promise: Callable[[ExchangeSettings], str] = lambda plan: ""

    @property
    def synchronous(self) -> bool:
        """Whether replicas take steps together."""
        return bool(self.factory)


@dataclass(frozen=True, kw_only=True)
class CompressionEntry:
    """A way to make gradients smaller. factory: module and name of what makes its `Reduction` of a group, and
    of the number behind its name, if it has one.

    number: reads that; `default` is taken where none is given. allows: which numbers are possible.
    """

    factory: str
    number: Callable[[str], int | float] | None = None
    default: int | float = 0
    allows: Callable[[float], bool] = lambda number: True


def _local_steps(plan: ExchangeSettings) -> str:
    return f"local_steps={plan.local_steps}" if plan.local_steps > 1 else ""


_ALL_REDUCE = "meshloom.exchange.all_reduce:open_all_reduce"
_LOCAL_SGD = "meshloom.exchange.local_sgd:open_local_sgd"
_WHOLE_SUMS = "gives each replica its part of the sums, and with exchange={} they are made whole. Use exchange=ring or halving, or leave zero out."
_WHO_UPDATES = "divides the optimizer state over replicas, and with exchange={} "
_ALL_UPDATE = f"{_WHO_UPDATES}each of them updates all parameters. Leave zero out."
_SERVERS_UPDATE = f"{_WHO_UPDATES}the servers do. Use servers=2 or more, and leave zero out."

EXCHANGES: Mapping[str, ExchangeEntry] = {
    "all_reduce": ExchangeEntry(factory=_ALL_REDUCE, sums=True),
    "ring": ExchangeEntry(factory=_ALL_REDUCE, sums=True, algorithm=True),
    "tree": ExchangeEntry(factory=_ALL_REDUCE, sums=True, algorithm=True, no_zero=_WHOLE_SUMS),
    "halving": ExchangeEntry(factory=_ALL_REDUCE, sums=True, algorithm=True),
    "hierarchical": ExchangeEntry(factory=_ALL_REDUCE, sums=True, algorithm=True, no_zero=_WHOLE_SUMS),
    "server": ExchangeEntry(
        factory="meshloom.exchange.server:open_server",
        agreement="servers add up their gradients and send new parameters",
        settings=("servers",),
        no_zero=_SERVERS_UPDATE,
    ),
    "async": ExchangeEntry(
        factory="",
        settings=("servers", "staleness", "rate_by_age"),
        no_zero=_SERVERS_UPDATE,
        breaks_promise=lambda plan: f"staleness={'inf' if plan.staleness is None else plan.staleness}",
    ),
    "local_sgd": ExchangeEntry(
        factory=_LOCAL_SGD,
        agreement="they average parameters now and then",
        settings=("local_steps",),
        independent=True,
        no_zero=_ALL_UPDATE,
        breaks_promise=_local_steps,
    ),
    "diloco": ExchangeEntry(
        factory="meshloom.exchange.diloco:open_diloco",
        agreement="they average parameters now and then",
        settings=("local_steps", "outer_learning_rate", "outer_momentum"),
        independent=True,
        no_zero=_ALL_UPDATE,
        breaks_promise=lambda plan: _local_steps(plan) or "exchange=diloco",
    ),
}

COMPRESSIONS: Mapping[str, CompressionEntry] = {
    "none": CompressionEntry(factory="meshloom.exchange.buckets.reduction:Exact"),
    "bf16": CompressionEntry(factory="meshloom.exchange.buckets.bf16:BF16"),
    "powersgd": CompressionEntry(  # by default as Vogels et al., who use 1 to 4
        factory="meshloom.exchange.buckets.powersgd:PowerSGD",
        number=int,
        default=4,
        allows=lambda rank: rank >= 1,
    ),
    "topk": CompressionEntry(
        factory="meshloom.exchange.buckets.topk:TopK",
        number=float,
        default=0.01,
        allows=lambda share: 0 < share <= 1,
    ),
}


def known_word(name: str, value: str, known: Collection[str]) -> None:
    """Raise `PlanError` for a value that is none of `known`."""
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
        raise PlanError(f"{name}={value} is not known. {hint}")


def check_exchange(plan: ExchangeSettings, defaults: Mapping[str, Any]) -> None:
    """Raise `PlanError` for settings that do not go together. defaults: of each setting."""
    known_word("exchange", plan.exchange, EXCHANGES)
    entry, exchange = EXCHANGES[plan.exchange], plan.exchange
    _check_ranges(plan)
    _check_belongs(plan, defaults)
    if plan.compress != "none":
        if not entry.sums or plan.zero:
            why = f"zero={plan.zero}" if entry.sums else f"exchange={exchange}"
            raise PlanError(
                f"compress={plan.compress} works on gradients that are all-reduced, and {why} sends something else. Leave one of them out."
            )
        if plan.dp == 1:
            raise PlanError(
                f"compress={plan.compress} makes smaller what replicas send each other, and dp=1. Use dp=2 or more, or leave compress out."
            )
    if plan.dp == 1 and entry.synchronous and exchange != "all_reduce":
        raise PlanError(
            f"exchange={exchange} is between replicas, and dp=1. Use dp=2 or more, or leave exchange out."
        )
    if entry.synchronous and plan.servers > plan.dp:
        raise PlanError(
            f"servers={plan.servers} share the ranks of dp={plan.dp} replicas. Use servers={plan.dp} or less."
        )
    if plan.zero and entry.no_zero:
        raise PlanError(f"zero={plan.zero} {entry.no_zero.format(exchange)}")
    if plan.sync_batch_norm and (entry.independent or not entry.synchronous):
        raise PlanError(
            f"sync_batch_norm=true joins the chunks of replicas that hold the same parameters, and with exchange={exchange} they do not. "
            "Use exchange=all_reduce or server, or sync_batch_norm=false."
        )


def _check_ranges(plan: ExchangeSettings) -> None:
    for name in ("servers", "local_steps"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name}={getattr(plan, name)} must be 1 or more.")
    if plan.staleness is not None and plan.staleness < 0:
        raise PlanError(f"staleness={plan.staleness} must be 0 or more, or inf.")
    if not (math.isfinite(plan.outer_learning_rate) and plan.outer_learning_rate > 0):
        raise PlanError(
            f"outer_learning_rate={plan.outer_learning_rate} must be more than 0, like outer_learning_rate=0.7."
        )
    if not 0 <= plan.outer_momentum < 1:
        raise PlanError(
            f"outer_momentum={plan.outer_momentum} must be at least 0 and less than 1, like outer_momentum=0.9."
        )


def _check_belongs(plan: ExchangeSettings, defaults: Mapping[str, Any]) -> None:
    """A setting that its exchange does not look at is a mistake."""
    for name in dict.fromkeys(name for entry in EXCHANGES.values() for name in entry.settings):
        if getattr(plan, name) != defaults[name] and name not in EXCHANGES[plan.exchange].settings:
            ways = " or ".join(
                f"exchange={each}" for each, entry in EXCHANGES.items() if name in entry.settings
            )
            raise PlanError(
                f"{name}={getattr(plan, name)} is for {ways}, and this plan has exchange={plan.exchange}. Use that, or leave {name} out."
            )


def complete_compress(text: str) -> str:
    """The setting with its number, in the one way in which it is written. Raises `PlanError`.

    >>> complete_compress("powersgd"), complete_compress("powersgd:2"), complete_compress("topk:0.10"), complete_compress("bf16")
    ('powersgd:4', 'powersgd:2', 'topk:0.1', 'bf16')
    """
    name, colon, written = text.partition(":")
    known_word("compress", name, COMPRESSIONS)
    entry = COMPRESSIONS[name]
    try:
        if entry.number is None and not colon:
            return name
        if entry.number is not None:
            number = entry.number(written) if colon else entry.default
            if entry.allows(number):
                return f"{name}:{number}"
    except ValueError:
        pass
    raise PlanError(
        f"compress={text} is not none, bf16, powersgd:R (matrices of rank R, 1 or more) or topk:X (the share X of elements, above 0 and up to 1). "
        "Write it like compress=powersgd:4 or compress=topk:0.01."
    )


def exempt_setting(plan: ExchangeSettings) -> str:
    """The setting because of which a plan need not equal one device; "" if it promises to.

    >>> from meshloom.core.plan import Plan
    >>> exempt_setting(Plan(dp=2, exchange="local_sgd", local_steps=8)), exempt_setting(Plan(dp=2, exchange="server"))
    ('local_steps=8', '')
    """
    return EXCHANGES[plan.exchange].breaks_promise(plan) or (
        f"compress={plan.compress}" if plan.compress != "none" else ""
    )
