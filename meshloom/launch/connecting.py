"""Creates the groups of a rank process, each over the transport that its ranks can use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from meshloom.comm.collectives.ring import RingGroup, ring_group
from meshloom.comm.group import Group
from meshloom.comm.network.hosts import HostsGroup
from meshloom.comm.network.two_level import HostsParts
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.torch.c10d import C10dGroup
from meshloom.core.mesh import Mesh
from meshloom.launch.names import rank_name
from meshloom.launch.transport import Hosts, Transports


class RankGroups:
    """The groups of one rank, to be closed together.

    store: for these groups alone. secret: shared by the ranks. device: of tensors in groups with NCCL.
    timeout: how long a rank waits for another when a group is created and in each of its operations.
    process_groups: those of torch.distributed that this rank is in.
    """

    def __init__(
        self, mesh: Mesh, rank: int, store: dist.Store, transports: Transports, device: torch.device,
        timeout: timedelta, secret: bytes = b"",
    ) -> None:  # fmt: skip
        self._mesh, self._rank, self._store, self._transports = mesh, rank, store, transports
        self._device, self._timeout, self._secret = device, timeout, secret
        self.process_groups: list[dist.ProcessGroup] = []
        self._open: list[C10dGroup | ShmGroup | HostsGroup | RingGroup] = []
        self._rounds = 0

    def connect(self, members: Iterable[Sequence[int]], backend: str, *, ring: bool = False) -> Group:
        """Create a group of each of `members`, collectively; the one that this rank is in.

        members: ascending ranks. backend: of torch.distributed; shared memory replaces gloo within hosts.
        ring: whether sums go around a ring of messages, in place of the transport's own.
        """
        self._rounds += 1
        mine: C10dGroup | ShmGroup | HostsGroup | None = None
        for ranks in members:
            hosts = self._transports.layers(ranks) if backend == "gloo" else None
            if hosts is None:
                group = self._over_network(ranks, backend)
            elif len(hosts) == 1:
                group = self._within_host(ranks, "all") if self._rank in ranks else None
            else:
                group = self._over_hosts(ranks, hosts)
            if group is not None:
                mine = group
        assert mine
        return self._on_ring(mine) if ring and mine.size > 1 else mine

    def close(self) -> None:
        """Close the groups that are not of torch.distributed. No rank waits for another here."""
        for group in reversed(self._open):
            group.close()
        self._open.clear()

    def _over_network(self, ranks: Sequence[int], backend: str) -> C10dGroup | None:
        process_group = dist.new_group(list(ranks), self._timeout, backend)
        if self._rank not in ranks:
            return None
        assert isinstance(process_group, dist.ProcessGroup)
        self.process_groups.append(process_group)
        device = self._device if "nccl" in backend else None
        group = C10dGroup(process_group, self._names(ranks), device, self._secret)
        self._open.append(group)
        return group

    def _within_host(self, ranks: Sequence[int], use: str) -> ShmGroup:
        hosts = self._transports.hosts
        group = ShmGroup(
            dist.PrefixStore(f"{self._rounds}/{ranks[0]}/{use}", self._store),
            ranks.index(self._rank),
            len(ranks),
            self._names(ranks),
            timeout=self._timeout,
            ranks_here=hosts.count(hosts[self._rank]),
            secret=self._secret,
        )
        self._open.append(group)
        return group

    def _on_ring(self, group: C10dGroup | ShmGroup | HostsGroup) -> RingGroup:
        on_ring = ring_group(
            group,
            name=rank_name(self._rank, self._mesh),
            who_left=(lambda: None) if isinstance(group, ShmGroup) else group.who_left,
        )
        self._open.append(on_ring)
        return on_ring

    def _over_hosts(self, ranks: Sequence[int], hosts: Hosts) -> HostsGroup | None:
        all_ranks = self._over_network(ranks, "gloo")
        across: C10dGroup | None = None
        for column in zip(*hosts, strict=True):
            members = [ranks[number] for number in column]
            across = self._over_network(members, "gloo") or across
        if all_ranks is None:
            return None
        assert across
        on_hosts = [[ranks[number] for number in host] for host in hosts]
        here = next(members for members in on_hosts if self._rank in members)
        parts = HostsParts(
            first=self._within_host(here, "first"),
            last=self._within_host(here, "last"),
            messages=self._within_host(here, "post"),
            across=across,
            all_ranks=all_ranks,
        )
        group = HostsGroup(hosts, parts, self._names(ranks), all_ranks.who_left)
        self._open.append(group)
        return group

    def _names(self, ranks: Sequence[int]) -> list[str]:
        """The name of each of `ranks` in errors: with its host, if they run on several."""
        return [rank_name(rank, self._mesh) + self._transports.where(rank, ranks) for rank in ranks]
