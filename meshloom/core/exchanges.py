"""The registry of exchanges, as plain values, and the checks of a plan's exchange settings.

An exchange, one way in which replicas agree, is a file in `exchange/` and its entry here. The entry names the
function that opens it, since this room imports none of those above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshloom.core.errors import PlanError
from meshloom.core.plan_text import check_known


class ExchangeSettings(Protocol):
    """The settings of a plan that are checked here."""

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
    @property
    def reduce(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ExchangeEntry:
    """An exchange that a plan can name.

    factory: "module:function" that opens it from a `Setup` (`exchange/registry.py`); "": replicas take no
        synchronous steps (`asynchronous/`). What is opened predicts the bytes that it sends.
    agreement: how replicas agree, as a clause.
    settings: settings of a plan that only this exchange, and others that list them, can have.
    sums: whether every replica gets the sum of all gradients, so that gradients can be compressed.
    fills: whether what opens it gives parameters their memory, as a rank may hold slices of them alone;
        otherwise they have it before.
    only_buckets: whether a rank holds nothing for it but gradients in buckets, as predictions of memory
        assume.
    independent: whether replicas take independent local steps, each from its own parameters.
    no_zero: why zero=1, 2 and 3 are refused, and what to do instead, as the end of a sentence; "": it is allowed.
    breaks_promise: of a plan, the setting with its value because of which the plan need not equal one device;
        "" if it promises to.
    """

    factory: str
    agreement: str = "they add up their gradients"
    settings: tuple[str, ...] = ()
    sums: bool = False
    fills: bool = False
    only_buckets: bool = False
    independent: bool = False
    no_zero: str = ""
    breaks_promise: Callable[[ExchangeSettings], str] = lambda plan: ""

    @property
    def synchronous(self) -> bool:
        """Whether replicas take synchronous steps."""
        return bool(self.factory)


@dataclass(frozen=True, kw_only=True)
class CompressionEntry:
    """A compression of gradients that a plan can name.

    factory: "module:class" of its `Reduction`, built from a group and the number after its name, if any.
    number: parses that number; None: it has none. default: the number if none is given.
    allows: whether a number is in range.
    remembers: whether what it does not send in a step is added to the next one.
    holds: of bytes of gradients, and of a bucket, those that a rank has for it all the time, and after a step's
        chunks.
    """

    factory: str
    number: Callable[[str], int | float] | None = None
    default: int | float = 0
    allows: Callable[[float], bool] = lambda number: True
    remembers: bool = False
    holds: Callable[[int, int], tuple[int, int]] = lambda gradients, bucket: (0, 0)


def _local_steps(plan: ExchangeSettings) -> str:
    return f"local_steps={plan.local_steps}" if plan.local_steps > 1 else ""


_ALL_REDUCE = "meshloom.exchange.all_reduce:open_all_reduce"
_LOCAL_SGD = "meshloom.exchange.local_sgd:open_local_sgd"
_WHO_UPDATES = "shards the optimizer state over replicas, and with exchange={} "
_ALL_UPDATE = f"{_WHO_UPDATES}each of them updates all parameters. Leave zero out."
_SERVERS_UPDATE = f"{_WHO_UPDATES}the servers do. Use servers=2 or more, and leave zero out."

EXCHANGES: Mapping[str, ExchangeEntry] = {
    "all_reduce": ExchangeEntry(factory=_ALL_REDUCE, fills=True, sums=True, only_buckets=True),
    "ring": ExchangeEntry(factory=_ALL_REDUCE, fills=True, sums=True),
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

# Exchanges of earlier versions, with what to write instead.
_OR_RING = "Use exchange=all_reduce, or exchange=ring, which shows its messages."
_GONE = {"tree": _OR_RING, "halving": _OR_RING, "hierarchical": _OR_RING}

COMPRESSIONS: Mapping[str, CompressionEntry] = {
    "none": CompressionEntry(factory="meshloom.exchange.buckets.reduction:Exact"),
    "bf16": CompressionEntry(
        factory="meshloom.exchange.buckets.bf16:BF16",
        holds=lambda gradients, bucket: (0, gradients // 2),  # the rounded copies
    ),
    "powersgd": CompressionEntry(  # by default as Vogels et al., who use 1 to 4
        factory="meshloom.exchange.buckets.powersgd:PowerSGD",
        number=int,
        default=4,
        allows=lambda rank: rank >= 1,
        remembers=True,
        holds=lambda gradients, bucket: (gradients, 2 * gradients),  # errors; matrices, and what was not sent
    ),
    "topk": CompressionEntry(
        factory="meshloom.exchange.buckets.topk:TopK",
        number=float,
        default=0.01,
        allows=lambda share: 0 < share <= 1,
        remembers=True,
        holds=lambda gradients, bucket: (gradients, min(gradients, bucket)),  # errors; a bucket's
    ),
}


# What gradients travel as -> the name of torch's dtype; "": whatever they have.
REDUCED_AS: Mapping[str, str] = {"own": "", "float32": "float32", "bf16": "bfloat16"}

# What a rank holds only its slices of, along dp, under zero=1, 2, 3; each in addition to those before.
ZERO_SLICES = ("the optimizer's state", "gradients", "parameters")


def check_zero(zero: int, within: int, dp: int) -> None:
    """Raise `PlanError` for values that `zero` and `zero_within` cannot have. dp: replicas."""
    known = "zero=0 (replicated), zero=1 (the optimizer's state sharded over dp), zero=2 (gradients too) or zero=3 (parameters too)"
    if not 0 <= zero <= len(ZERO_SLICES):
        raise PlanError(f"zero={zero} is not known. Use {known}.")
    if not within:
        return
    if zero != len(ZERO_SLICES):
        raise PlanError(
            f"zero_within={within} says over how many replicas zero=3 slices, and zero={zero}. Use zero=3, or leave zero_within out."
        )
    if within == 1:
        raise PlanError("zero_within=1 slices nothing: each replica would keep all. Use zero=0.")
    if within < 0 or dp % within:
        raise PlanError(
            f"zero_within={within} cannot divide dp={dp} replicas into equal groups. Use a divisor of {dp} from 2 on, such as the ranks of a host."
        )


def check_offload(offload: str, exchange: str) -> None:
    """Raise `PlanError` for values that `offload` cannot have."""
    check_known("offload", offload, ("none", "optimizer"))
    if offload != "none" and not EXCHANGES[exchange].synchronous:
        raise PlanError(
            f"offload={offload} is for ranks that update together, and with exchange={exchange} servers copy their state in memory for every snapshot. "
            "Use another exchange, or leave offload out."
        )


def check_exchange(plan: ExchangeSettings, defaults: Mapping[str, Any]) -> None:
    """Raise `PlanError` for exchange settings that contradict each other. defaults: of every setting."""
    check_known("exchange", plan.exchange, EXCHANGES, _GONE)
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
                f"compress={plan.compress} compresses what replicas send each other, and dp=1. Use dp=2 or more, or leave compress out."
            )
    _check_reduce(plan)
    if plan.dp == 1 and entry.synchronous and exchange != "all_reduce":
        raise PlanError(
            f"exchange={exchange} is between replicas, and dp=1. Use dp=2 or more, or leave exchange out."
        )
    if entry.synchronous and plan.servers > plan.dp:
        raise PlanError(
            f"servers={plan.servers} are among the dp={plan.dp} replicas. Use servers={plan.dp} or less."
        )
    if plan.zero and entry.no_zero:
        raise PlanError(f"zero={plan.zero} {entry.no_zero.format(exchange)}")
    if plan.sync_batch_norm and (entry.independent or not entry.synchronous):
        raise PlanError(
            f"sync_batch_norm=true joins the chunks of replicas that hold the same parameters, and with exchange={exchange} they do not. "
            "Use exchange=all_reduce or server, or sync_batch_norm=false."
        )


def _check_reduce(plan: ExchangeSettings) -> None:
    check_known("reduce", plan.reduce, REDUCED_AS)
    entry, told = EXCHANGES[plan.exchange], f"reduce={plan.reduce} says what gradients travel as"
    if plan.reduce == "own":
        return
    if entry.independent or not entry.synchronous:
        what = "parameters travel" if entry.independent else "workers push theirs one by one"
        raise PlanError(
            f"{told}, and with exchange={plan.exchange} {what}. Use exchange=all_reduce or server, or leave reduce out."
        )
    if plan.compress != "none":
        raise PlanError(f"{told}, and so does compress={plan.compress}. Leave one of them out.")
    if plan.dp == 1:
        raise PlanError(f"{told} between replicas, and dp=1. Use dp=2 or more, or leave reduce out.")


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
    """Raise `PlanError` for a setting that the exchange does not use."""
    for name in dict.fromkeys(name for entry in EXCHANGES.values() for name in entry.settings):
        if getattr(plan, name) != defaults[name] and name not in EXCHANGES[plan.exchange].settings:
            exchanges = " or ".join(
                f"exchange={each}" for each, entry in EXCHANGES.items() if name in entry.settings
            )
            raise PlanError(
                f"{name}={getattr(plan, name)} is for {exchanges}, and this plan has exchange={plan.exchange}. Use that, or leave {name} out."
            )


def complete_compress(text: str) -> str:
    """The canonical text of the setting `compress`, with its number. Raises `PlanError`.

    >>> complete_compress("powersgd"), complete_compress("powersgd:2"), complete_compress("topk:0.10"), complete_compress("bf16")
    ('powersgd:4', 'powersgd:2', 'topk:0.1', 'bf16')
    """
    name, colon, written = text.partition(":")
    check_known("compress", name, COMPRESSIONS)
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


def compression_of(plan: ExchangeSettings) -> tuple[CompressionEntry, str]:
    """What the plan's `compress` names, and its number as text."""
    name, _, number = plan.compress.partition(":")
    return COMPRESSIONS[name], number


def holds_only_buckets(plan: ExchangeSettings) -> bool:
    """Whether a rank holds nothing for the exchange but gradients in buckets, without errors of a
    compression."""
    return EXCHANGES[plan.exchange].only_buckets and plan.compress == "none"


def exempt_setting(plan: ExchangeSettings) -> str:
    """The setting because of which a plan need not equal one device; "" if it promises to.

    >>> from meshloom.core.plan import Plan
    >>> exempt_setting(Plan(dp=2, exchange="local_sgd", local_steps=8)), exempt_setting(Plan(dp=2, exchange="server"))
    ('local_steps=8', '')
    """
    return EXCHANGES[plan.exchange].breaks_promise(plan) or (
        f"compress={plan.compress}" if plan.compress != "none" else ""
    )
