"""The settings of a plan that say how replicas agree: what each can be, and which of them go together."""

from __future__ import annotations

import difflib
import math
from typing import Protocol

from meshloom.core.costs import ALGORITHMS
from meshloom.core.errors import PlanError

EXCHANGES = ("all_reduce", *ALGORITHMS, "server", "async", "local_sgd", "diloco")
SCATTERING = ("ring", "halving")  # those of ALGORITHMS that scatter what they sum: zero=1 needs that
COMPRESS = ("none", "bf16", "powersgd", "topk")
DEFAULT_RANK = 4  # of powersgd: Vogels et al. use 1 to 4
DEFAULT_SHARE = 0.01  # of topk


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


def known_word(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `PlanError` for a value that is none of `known`."""
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
        raise PlanError(f"{name}={value} is not known. {hint}")


def check_exchange(plan: ExchangeSettings) -> None:
    """Raise `PlanError` for settings that do not go together."""
    known_word("exchange", plan.exchange, EXCHANGES)
    _check_ranges(plan)
    _check_belongs(plan)
    exchange = plan.exchange
    sums_up = exchange == "all_reduce" or exchange in ALGORITHMS
    if plan.compress != "none":
        if not sums_up or plan.zero:
            why = f"zero={plan.zero}" if sums_up else f"exchange={exchange}"
            raise PlanError(
                f"compress={plan.compress} works on gradients that are all-reduced, and {why} sends something else. Leave one of them out."
            )
        if plan.dp == 1:
            raise PlanError(
                f"compress={plan.compress} makes smaller what replicas send each other, and dp=1. Use dp=2 or more, or leave compress out."
            )
    if exchange == "all_reduce":
        return
    if plan.dp == 1 and exchange != "async":
        raise PlanError(f"exchange={exchange} is between replicas, and dp=1. Use dp=2 or more, or leave exchange out.")
    if exchange == "server" and plan.servers > plan.dp:
        raise PlanError(f"servers={plan.servers} share the ranks of dp={plan.dp} replicas. Use servers={plan.dp} or less.")
    if plan.zero and exchange in SCATTERING:
        return
    if plan.zero and exchange in ALGORITHMS:
        raise PlanError(
            f"zero={plan.zero} gives each replica its part of the sums, and with exchange={exchange} they are made whole. "
            f"Use exchange={' or '.join(SCATTERING)}, or leave zero out."
        )
    if plan.zero:
        who = (
            "each of them updates all parameters. Leave zero out"
            if exchange in ("local_sgd", "diloco")
            else "the servers do. Use servers=2 or more, and leave zero out"
        )
        raise PlanError(f"zero={plan.zero} divides the optimizer state over replicas, and with exchange={exchange} {who}.")
    if plan.sync_batch_norm and exchange != "server" and not sums_up:
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
        raise PlanError(f"outer_learning_rate={plan.outer_learning_rate} must be more than 0, like outer_learning_rate=0.7.")
    if not 0 <= plan.outer_momentum < 1:
        raise PlanError(f"outer_momentum={plan.outer_momentum} must be at least 0 and less than 1, like outer_momentum=0.9.")


def _check_belongs(plan: ExchangeSettings) -> None:
    """A setting that its exchange does not look at is a mistake."""
    belongs = {
        "servers": (plan.servers != 1, ("server", "async")),
        "staleness": (plan.staleness is not None, ("async",)),
        "rate_by_age": (plan.rate_by_age, ("async",)),
        "local_steps": (plan.local_steps != 1, ("local_sgd", "diloco")),
        "outer_learning_rate": (plan.outer_learning_rate != 0.7, ("diloco",)),
        "outer_momentum": (plan.outer_momentum != 0.9, ("diloco",)),
    }
    for name, (is_set, exchanges) in belongs.items():
        if is_set and plan.exchange not in exchanges:
            ways = " or ".join(f"exchange={each}" for each in exchanges)
            raise PlanError(f"{name}={getattr(plan, name)} is for {ways}, and this plan has exchange={plan.exchange}. Use that, or leave {name} out.")


def complete_compress(text: str) -> str:
    """The setting with its number, in the one way in which it is written. Raises `PlanError`.

    >>> complete_compress("powersgd"), complete_compress("powersgd:2"), complete_compress("topk:0.10"), complete_compress("bf16")
    ('powersgd:4', 'powersgd:2', 'topk:0.1', 'bf16')
    """
    kind, colon, number = text.partition(":")
    known_word("compress", kind, COMPRESS)
    try:
        if kind == "powersgd":
            rank = int(number) if colon else DEFAULT_RANK
            if rank >= 1:
                return f"powersgd:{rank}"
        elif kind == "topk":
            share = float(number) if colon else DEFAULT_SHARE
            if 0 < share <= 1:
                return f"topk:{share}"
        elif not colon:
            return kind
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
    if plan.exchange == "async":
        return f"staleness={'inf' if plan.staleness is None else plan.staleness}"
    if plan.compress != "none":
        return f"compress={plan.compress}"
    if plan.local_steps > 1:
        return f"local_steps={plan.local_steps}"
    return "exchange=diloco" if plan.exchange == "diloco" else ""
