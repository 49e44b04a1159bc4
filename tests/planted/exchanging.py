"""Bugs of how gradients of replicas and stages come together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshloom.comm.reductions
import meshloom.exchange.sparse_gradients
from meshloom.core.losses.loss_sum import divides
from meshloom.exchange.buckets.reduction import Exact
from meshloom.exchange.server import Server
from meshloom.parameters.pipeline_ownership import PipelineOwnership
from tests.planted.bugs import Patch, bug, wrap

SERVERS = "dp=3,exchange=server,servers=2"


def server_adds_up(patch: Patch, counted: Any) -> None:
    """A server's sum: its first row, and of what is pushed to it only the rows that `counted` chooses."""

    def add_up(right: Any, self: Server) -> list[Tensor]:
        chosen = counted(self._num_owners)
        return [pushed[0].add_(pushed[chosen].sum(0)) for pushed in self._pushed]

    wrap(patch, Server, "_add_up", add_up)


@bug("seventh/server_adds_up_servers_only", "plain", SERVERS)
def server_adds_up_servers_only(patch: Patch) -> None:
    """Servers leave out the gradients of the one rank that is only a worker."""
    server_adds_up(patch, lambda servers: slice(1, servers))


@bug("sixth/server_adds_workers_only", "text", SERVERS)
def server_adds_workers_only(patch: Patch) -> None:
    """Servers leave out the gradients of the second server's share of the batch."""
    server_adds_up(patch, lambda servers: slice(servers, None))


@bug("eighth/sparse_rows_keep_loss_scale", "tabled", "dp=2,precision=fp16-mixed", module="embed")
def sparse_rows_keep_loss_scale(patch: Patch) -> None:
    """Sparse gradients are not divided where the divisor is a tensor on the device, as with a loss scale."""
    right = meshloom.exchange.sparse_gradients.divides
    patch.setattr(
        meshloom.exchange.sparse_gradients,
        "divides",
        lambda divisor: isinstance(divisor, float) and right(divisor),
    )


@bug("sixth/all_reduce_last_undivided", "weighted", "dp=2", module="first", quick=True)
def all_reduce_last_undivided(patch: Patch) -> None:
    """The last parameter of a bucket is not divided by the weight of the batch."""

    def finish(right: Any, self: Exact, buckets: Any, divisor: Any) -> Any:
        right(self, buckets, divisor)
        for bucket in buckets if divides(divisor) else ():
            bucket.flat[bucket.entries[-1].start : bucket.length].mul_(divisor)

    wrap(patch, Exact, "finish", finish)


@bug(
    "eighth/flags_by_minimum",
    "branching",
    "dp=2,exchange=ring,zero=1",
    module="negative",
    quick=True,
    phase="step 2",
)
def flags_by_minimum(patch: Patch) -> None:
    """The ring combines flags of used parameters by their minimum: what one replica used counts as unused."""

    def combine(right: Any, total: Tensor, other: Tensor, op: str) -> None:
        torch.minimum(total, other, out=total) if op == "max" else right(total, other, op)

    wrap(patch, meshloom.comm.reductions, "combine", combine)


@bug("fourth/third_stage_tied", "tied thrice", "pp=3,cuts=blocks.1+blocks.2,microbatches=2", module="embed")
def third_stage_tied(patch: Patch) -> None:
    """Of a tied weight that three stages use, the gradient of the third never comes to the owner."""

    def returned(right: Any, self: PipelineOwnership, parameters: Any) -> Any:
        holders = self.holders
        self.holders = {name: ranks[:2] for name, ranks in holders.items()}
        try:
            right(self, parameters)
        finally:
            self.holders = holders

    wrap(patch, PipelineOwnership, "return_gradients", returned)
