"""Some ranks are parameter servers: all ranks send them gradients; the servers update and send back the new
values.

                        pushed: gradients           pulled: parameters
    rank 0, server 0    [ 0+1+2+3 |         ]       [ updated | <------ ]
    rank 1, server 1    [         | 0+1+2+3 ]       [ ------> | updated ]
    rank 2, worker      [ to 0    | to 1    ]       [ from 0  | from 1  ]
    rank 3, worker      [ to 0    | to 1    ]       [ from 0  | from 1  ]

Once a step, with the mean over all ranks. Servers compute a share of the batch like the other ranks. A server
needs memory for the gradients of all ranks, dp / servers times the size of the model, and adds them up in
rank order (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014, with a barrier
in each step).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group
from meshloom.exchange.buckets.buckets import Bucket, GradientBuckets
from meshloom.exchange.copies import ParameterCopies
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.exchange.sharded import Sharded
from meshloom.exchange.slices import flatten_parameters, share_of
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


def open_server(setup: Setup) -> Exchange:
    """The exchange with the plan's number of servers."""
    return Server(
        setup.dense,
        setup.group,
        num_servers=setup.plan.servers,
        travels=setup.travels,
        in_order=setup.plan.tp > 1,
        **setup.bucket_settings,
    )


class Server(Sharded):
    """The first `num_servers` ranks of `group` own all parameters, split evenly by bytes; the others own
    none. in_order: as of `GradientBuckets`. travels: what gradients travel as; None: their own dtype."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        num_servers: int,
        bucket_bytes: int,
        overlap: bool,
        replicated: Collection[str] = (),
        in_order: bool = False,
        travels: torch.dtype | None = None,
    ) -> None:
        gradients = GradientBuckets(
            named,
            bucket_bytes=bucket_bytes,
            start=self._start,
            overlap=overlap,
            multiple=num_servers,
            replicated=replicated,
            in_order=in_order,
        )
        buckets = gradients.buckets
        super().__init__(gradients, group, num_servers, _FromServers(buckets, group, num_servers))
        is_server = group.rank < num_servers
        # [ranks, n] per bucket: where a server receives its share of everybody's gradients.
        self._pushed = [
            bucket.flat.new_zeros(group.size, bucket.flat.numel() // num_servers)
            for bucket in buckets
            if is_server
        ]
        self._travelling = TravellingSums(group, travels)
        self._num_bytes = sum(
            self._travelling.num_bytes(each.flat.numel(), each.flat.dtype) for each in buckets
        )

    def _start(self, bucket: Bucket) -> None:
        bucket.flat[bucket.length :].zero_()
        for server in range(self._num_owners):
            rows = list(self._pushed[bucket.number]) if server == self._group.rank else None
            self._works.append(
                self._travelling.gather(rows, share_of(bucket.flat, server, self._num_owners), server)
            )

    def _expected_bytes(self) -> ExpectedBytes:
        return ExpectedBytes(per_step=Traffic.along("dp", gather=self._num_bytes))

    def _add_up(self) -> list[Tensor]:
        for pushed in self._pushed:
            for theirs in pushed[1:]:
                pushed[0].add_(theirs)
        return [pushed[0] for pushed in self._pushed]

    def _gather(self, whole: Tensor, share: Tensor | None) -> None:
        if share is not None:
            share_of(whole, self._group.rank, self._num_owners).copy_(share)
        _pull([whole], self._group, self._num_owners)


class _FromServers(ParameterCopies):
    """A copy for every replica, of which each server sends its share."""

    def __init__(self, buckets: Sequence[Bucket], group: Group, num_servers: int) -> None:
        self._group, self._num_servers = group, num_servers
        self._flats = [flatten_parameters(bucket) for bucket in buckets]
        self.traffic = Traffic.along("dp", broadcast=sum(each.nbytes for each in self._flats))

    def publish(self) -> None:
        _pull(self._flats, self._group, self._num_servers)


def _pull(flats: Sequence[Tensor], group: Group, num_servers: int) -> None:
    """Every rank receives each server's share of tensors that have the buckets' layout."""
    servers = range(num_servers)
    works = [
        group.broadcast(share_of(flat, server, num_servers), server) for flat in flats for server in servers
    ]
    for work in works:
        work.wait()
