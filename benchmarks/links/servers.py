"""One exchange through parameter servers on hosts of their own, message by message: workers push gradients,
servers add them up, workers pull.

    worker 0 --push S/k--> server 0   server 0 --S/k--> worker 0       N workers, k servers
    worker 0 --push S/k--> server 1   server 1 --S/k--> worker 0       2 a + 2 N S/(k B): a server's link carries
    ...                                                                N shares in, and then N out

`exchange=server` of a plan computes the same sums on ranks that are workers too, in gathers and broadcasts
(docs/exchanges.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group


class Star:
    """This rank's part: the first `num_workers` ranks of `group` are workers, the others servers.

    tensor: flat gradients [n], on workers; every worker's becomes the sum over workers. On servers only its
        size counts.
    """

    def __init__(self, group: Group, num_workers: int, tensor: Tensor) -> None:
        self._group, self._workers, self._servers = group, range(num_workers), range(num_workers, group.size)
        shares = tensor.tensor_split(len(self._servers))
        self._shares: Sequence[Tensor] = shares if group.rank in self._workers else []
        if group.rank in self._servers:
            own = shares[group.rank - num_workers]
            self._inbox = [torch.empty_like(own) for _ in self._workers]

    def exchange(self) -> None:
        """One push, sum and pull; returns when this rank's part is over."""
        if self._group.rank in self._workers:
            self._work()
        else:
            self._serve()

    def _work(self) -> None:
        pushes = [
            self._group.send(share, server) for share, server in zip(self._shares, self._servers, strict=True)
        ]
        for push in pushes:
            push.wait()
        pulls = [
            self._group.recv(share, server) for share, server in zip(self._shares, self._servers, strict=True)
        ]
        for pull in pulls:
            pull.wait()

    def _serve(self) -> None:
        for work in [
            self._group.recv(share, worker) for share, worker in zip(self._inbox, self._workers, strict=True)
        ]:
            work.wait()
        total = self._inbox[0]
        for share in self._inbox[1:]:  # in the order of ranks
            total += share
        for work in [self._group.send(total, worker) for worker in self._workers]:
            work.wait()
