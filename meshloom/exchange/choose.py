"""The exchange that a plan with several replicas asks for by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import nn

from meshloom.comm.group import Group
from meshloom.core.plan import Plan
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.alone import Alone
from meshloom.exchange.buckets.bf16 import BF16
from meshloom.exchange.buckets.powersgd import PowerSGD
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.exchange.buckets.topk import TopK
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.server import Server


def exchange_by_name(plan: Plan, named: Sequence[tuple[str, nn.Parameter]], group: Group, *, apart: Collection[str] = ()) -> Exchange | None:
    """Of servers, replicas that step by themselves, and compressed gradients; None for the exact all-reduce, which may be done in several ways.

    named, apart: as for `GradientBuckets`. group: the replicas.
    """
    if plan.local:
        return Alone(named)
    settings: dict[str, Any] = {"bucket_bytes": plan.bucket_bytes, "overlap": plan.overlap, "apart": apart}
    if plan.exchange == "server":
        return Server(named, group, num_servers=plan.servers, **settings)
    if plan.compress != "none":
        return AllReduce(named, group, reduction=_reduction(plan.compress), **settings)
    return None


def _reduction(compress: str) -> Callable[[Group], Reduction]:
    kind, _, number = compress.partition(":")
    if kind == "powersgd":
        return partial(PowerSGD, rank=int(number))
    return partial(TopK, share=float(number)) if kind == "topk" else BF16
