"""Some ranks are parameter servers: all ranks send them their gradients, they update, and send everybody the new values.

                        pushed: gradients           pulled: parameters
    rank 0, server 0    [ 0+1+2+3 |         ]       [ updated | <------ ]
    rank 1, server 1    [         | 0+1+2+3 ]       [ ------> | updated ]
    rank 2, worker      [ to 0    | to 1    ]       [ from 0  | from 1  ]
    rank 3, worker      [ to 0    | to 1    ]       [ from 0  | from 1  ]

Once a step, on the mean over all ranks. Servers compute a share of the batch like the others. A server needs room for what all ranks send it,
dp / servers times the gradients, and adds it up in rank order (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014,
with a barrier in each step).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group, Work
from meshloom.comm.steps import Steps
from meshloom.exchange.buckets.buckets import Bucket, GradientBuckets
from meshloom.exchange.exchange import Exchange, Give, Slice
from meshloom.exchange.registry import Setup
from meshloom.exchange.slices import OwnedSlices, Used, give_bucket, move_into_flat, share_of
from meshloom.program.operators.fused_grad_accumulation import Room


def open_server(setup: Setup) -> Exchange:
    """As the plan's settings say."""
    return Server(setup.dense, setup.group, num_servers=setup.plan.servers, **setup.bucket_settings)


class Server(Exchange):
    """The first `num_servers` ranks of `group` own everything, divided evenly by bytes; the others own nothing."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        *,
        num_servers: int,
        bucket_bytes: int,
        overlap: bool,
        apart: Collection[str] = (),
    ) -> None:
        self._group = group
        self._num_servers = num_servers
        self._works: list[Work] = []
        self._buckets = GradientBuckets(named, bucket_bytes=bucket_bytes, start=self._start, overlap=overlap, multiple=num_servers, apart=apart)
        buckets = self._buckets.buckets
        is_server = group.rank < num_servers
        # [ranks, n] per bucket: where a server receives its share of everybody's gradients.
        self._pushed = [bucket.flat.new_zeros(group.size, bucket.flat.numel() // num_servers) for bucket in buckets if is_server]
        self._parameters = [move_into_flat(bucket) for bucket in buckets]
        self._used = Used(buckets, group)
        self._is_used: list[bool] = []
        self._mine = OwnedSlices(buckets, group.rank, num_servers)

    @property
    def owned(self) -> Sequence[Slice]:
        return self._mine.slices

    @property
    def owners(self) -> Group:
        return self._group

    @property
    def num_owners(self) -> int:
        return self._num_servers

    def begin_step(self) -> None:
        self._works.clear()
        self._buckets.begin_step()

    def begin_last_chunk(self) -> None:
        self._buckets.begin_last_chunk()

    def room(self, parameter: Tensor) -> Room | None:
        return self._buckets.room(parameter)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        self._buckets.gradient_ready(parameter)

    def finish(self, weight: Tensor) -> Steps[list[Tensor | None]]:
        self._buckets.start_rest()
        self._works.append(self._used.start())
        yield
        for work in self._works:
            work.wait()
        divisor = float(weight)
        for pushed in self._pushed:
            for theirs in pushed[1:]:
                pushed[0].add_(theirs)
            if divisor != 1.0:
                pushed[0].div_(divisor)
        self._is_used = self._used.found()
        yield from self._buckets.share_order(self._group)
        return self._mine.gradients([pushed[0] for pushed in self._pushed], self._is_used)

    def publish(self) -> Steps[None]:
        yield from self._pull(self._parameters)

    def each_gradient(self, gradients: list[Tensor | None], give: Give) -> Steps[None]:
        is_used = iter(self._is_used)
        shares = self._mine.shares(gradients, [pushed[0] for pushed in self._pushed])
        for bucket, share in zip_longest(self._buckets.buckets, shares):  # workers have none
            whole = torch.zeros_like(bucket.flat)
            if share is not None:
                share_of(whole, self._group.rank, self._num_servers).copy_(share)
            yield from self._pull([whole])
            yield from give_bucket(bucket, whole, is_used, give)

    def bytes_per_step(self) -> dict[str, int]:
        total = sum(bucket.num_bytes for bucket in self._buckets.buckets)
        return {"gather": total, "broadcast": total, "all_reduce": self._used.num_bytes}

    def bytes_once(self) -> dict[str, int]:
        return {"broadcast": 8 * len(self._buckets.buckets)}

    def _start(self, bucket: Bucket) -> None:
        bucket.flat[bucket.length :].zero_()
        for server in range(self._num_servers):
            rows = list(self._pushed[bucket.number]) if server == self._group.rank else None
            self._works.append(self._group.gather(rows, share_of(bucket.flat, server, self._num_servers), server))

    def _pull(self, flats: Sequence[Tensor]) -> Steps[None]:
        """Everybody gets each server's share of tensors that are laid out like the buckets."""
        servers = range(self._num_servers)
        works = [self._group.broadcast(share_of(flat, server, self._num_servers), server) for flat in flats for server in servers]
        yield
        for work in works:
            work.wait()
