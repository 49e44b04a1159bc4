"""Groups over several hosts whose ranks are threads, and what one process says that operations on them
give."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from thread_groups import threaded_groups
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.network.hosts import HostsGroup
from meshloom.comm.network.two_level import HostsParts


@contextmanager
def hosts_groups(hosts: Sequence[Sequence[int]]) -> Generator[list[HostsGroup]]:
    """The group of `hosts`, as seen by each of its ranks, closed in the end."""
    size = sum(map(len, hosts))
    whole = threaded_groups(size)
    across = [threaded_groups(len(hosts)) for _ in hosts[0]]
    inside = [[threaded_groups(len(ranks)) for _ in range(3)] for ranks in hosts]
    found: list[Any] = [None] * size
    for host, ranks in enumerate(hosts):
        for index, rank in enumerate(ranks):
            first, last, post = (groups[index] for groups in inside[host])
            parts = HostsParts(
                first=first, last=last, messages=post, across=across[index][host], all_ranks=whole[rank]
            )
            found[rank] = HostsGroup(hosts, parts, [f"rank {number}" for number in range(size)])
    try:
        yield found
    finally:
        for group in found:
            group.close()


def calls_of(*sizes: tuple[int, int]) -> list[Call]:
    """Every operation with every kind of sum. sizes: elements and root."""
    names = [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "send",
        "barrier",
        "gather",
        "all_to_all",
    ]
    sums = ((torch.float32, "sum"), (torch.int64, "max"), (torch.bfloat16, "avg"))
    return [
        Call(name, count, dtype, op, root) for dtype, op in sums for count, root in sizes for name in names
    ]


@dataclass(frozen=True)
class Call:
    """One operation of all ranks. count: elements of what a rank gets or sends, per rank where it is divided.
    root: of broadcast and gather."""

    name: str
    count: int
    dtype: torch.dtype
    op: str = "sum"
    root: int = 0

    def given(self, rank: int, size: int) -> Tensor:
        """What `rank` hands in: small whole numbers, so that no sum rounds; those of a root as if each were
        one."""
        count = self.count * size if self.name in ("reduce_scatter", "all_to_all") else self.count
        return ((torch.arange(count) * 7 + rank * 5 + self.count) % 11).to(self.dtype)

    def start(self, group: Group) -> tuple[Sequence[Work], Tensor]:
        """Start it on this rank; where the result will lie."""
        mine, n = self.given(group.rank, group.size), self.count
        is_root = group.rank == self.root
        match self.name:
            case "all_reduce":
                return [group.all_reduce(mine, self.op)], mine  # type: ignore[arg-type]
            case "reduce_scatter":
                output = torch.full((n,), -1).to(self.dtype)
                return [group.reduce_scatter(output, mine, self.op)], output  # type: ignore[arg-type]
            case "broadcast":
                return [group.broadcast(mine, self.root)], mine
            case "barrier":
                return [group.barrier()], mine
            case "send":  # to the next rank, from the one before
                output = torch.full((n,), -1).to(self.dtype)
                return [
                    group.send(mine, (group.rank + 1) % group.size),
                    group.recv(output, (group.rank - 1) % group.size),
                ], output
        output = torch.full((n * group.size,), -1).to(self.dtype)
        match self.name:
            case "all_gather":
                return [group.all_gather(output, mine)], output
            case "all_to_all":
                return [group.all_to_all(output, mine, [n] * group.size, [n] * group.size)], output
            case _:
                return [
                    group.gather(list(output.view(group.size, n)) if is_root else None, mine, self.root)
                ], output

    def expected(self, rank: int, size: int) -> Tensor:
        """What one process that sees all ranks' tensors computes, in plain arithmetic."""
        given, n = [self.given(other, size) for other in range(size)], self.count
        reduced = torch.stack(given).double()
        reduced = {
            "sum": reduced.sum(0),
            "avg": reduced.sum(0) / size,
            "max": reduced.amax(0),
            "min": reduced.amin(0),
        }[self.op].to(self.dtype)
        match self.name:
            case "all_reduce":
                return reduced
            case "reduce_scatter":
                return reduced[rank * n : (rank + 1) * n]
            case "broadcast":
                return given[self.root]
            case "barrier":
                return given[rank]
            case "send":
                return given[(rank - 1) % size]
            case "all_to_all":
                return torch.cat([each[rank * n : (rank + 1) * n] for each in given])
            case "all_gather":
                return torch.cat(given)
            case _:
                return torch.cat(given) if rank == self.root else torch.full((n * size,), -1).to(self.dtype)


def run_calls(group: Group, calls: Sequence[Call], seed: int) -> list[Tensor]:
    """Start the calls in order, waiting for some of those started in between, in an order of this rank's
    own."""
    chooser = random.Random(seed)
    results, open_ = [], []
    for call in calls:
        works, result = call.start(group)
        results.append(result)
        open_.append(works)
        while open_ and chooser.random() < 0.4:
            for work in open_.pop(chooser.randrange(len(open_))):
                work.wait()
                assert work.is_finished()
    for works in open_:
        for work in works:
            work.wait()
            work.wait()  # a second wait changes nothing
            assert work.is_finished()
    return results
