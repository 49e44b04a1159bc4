"""Creates the groups of a rank process, each over the transport that its ranks can use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from meshloom.comm.collectives.explicit import ExplicitGroup, explicit_group
from meshloom.comm.group import Group
from meshloom.comm.liveness.activity import Activity
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
        self,
        mesh: Mesh,
        rank: int,
        store: dist.Store,
        transports: Transports,
        device: torch.device,
        timeout: timedelta,
        activity: Activity,
        secret: bytes = b"",
    ) -> None:
        self._mesh, self._rank, self._store, self._transports, self._secret = (
            mesh,
            rank,
            store,
            transports,
            secret,
        )
        self._device, self._timeout, self._activity = device, timeout, activity
        self.process_groups: list[dist.ProcessGroup] = []
        self._open: list[ShmGroup | HostsGroup | ExplicitGroup] = []
        self._rounds = 0

    def connect(self, members: Iterable[Sequence[int]], backend: str, algorithm: str = "") -> Group:
        """Create a group of each of `members`, collectively; the one that this rank is in.

        members: ascending ranks. backend: of torch.distributed; shared memory replaces gloo within hosts.
        algorithm: of all-reduces, one of `ALGORITHMS`; "": the transport's own.
        """
        self._rounds += 1
        mine: C10dGroup | ShmGroup | HostsGroup | None = None
        mine_of: Sequence[int] = ()
        # waits of a thread do not delay this rank
        activity = Activity() if algorithm else self._activity
        for ranks in members:
            hosts = self._transports.layers(ranks) if backend == "gloo" else None
            if hosts is None:
                made = self._over_network(ranks, backend, activity)
            elif len(hosts) == 1:
                made = self._within_host(ranks, "all", activity) if self._rank in ranks else None
            else:
                made = self._over_hosts(ranks, hosts, activity)
            if made is not None:
                mine, mine_of = made, ranks
        assert mine
        return self._explicit(mine, mine_of, algorithm) if algorithm and mine.size > 1 else mine

    def close(self) -> None:
        """Close the groups that are not of torch.distributed. No rank waits for another here."""
        for group in reversed(self._open):
            group.close()
        self._open.clear()

    def _over_network(
        self, ranks: Sequence[int], backend: str, activity: Activity | None = None
    ) -> C10dGroup | None:
        process_group = dist.new_group(list(ranks), self._timeout, backend)
        if self._rank not in ranks:
            return None
        assert isinstance(process_group, dist.ProcessGroup)
        self.process_groups.append(process_group)
        return C10dGroup(
            process_group,
            self._names(ranks),
            self._device if "nccl" in backend else None,
            activity or self._activity,
            self._secret,
        )

    def _within_host(self, ranks: Sequence[int], use: str, activity: Activity | None = None) -> ShmGroup:
        hosts = self._transports.hosts
        group = ShmGroup(
            dist.PrefixStore(f"{self._rounds}/{ranks[0]}/{use}", self._store),
            ranks.index(self._rank),
            len(ranks),
            self._names(ranks),
            timeout=self._timeout,
            ranks_here=hosts.count(hosts[self._rank]),
            activity=activity or self._activity,
            secret=self._secret,
        )
        self._open.append(group)
        return group

    def _explicit(
        self, group: C10dGroup | ShmGroup | HostsGroup, ranks: Sequence[int], algorithm: str
    ) -> ExplicitGroup:
        at = {
            number: host for host, numbers in enumerate(self._transports.layout(ranks)) for number in numbers
        }
        made = explicit_group(
            group,
            algorithm,
            hosts=[at[number] for number in range(len(ranks))],
            name=rank_name(self._rank, self._mesh),
            activity=self._activity,
            who_left=(lambda: None) if isinstance(group, ShmGroup) else group.who_left,
        )
        self._open.append(made)
        return made

    def _over_hosts(self, ranks: Sequence[int], hosts: Hosts, activity: Activity) -> HostsGroup | None:
        whole = self._over_network(ranks, "gloo", activity)
        in_background = Activity()  # waits of threads do not delay this rank
        between: C10dGroup | None = None
        for column in zip(*hosts, strict=True):
            between = (
                self._over_network([ranks[number] for number in column], "gloo", in_background) or between
            )
        if whole is None:
            return None
        assert between
        here = next(
            members for host in hosts if self._rank in (members := [ranks[number] for number in host])
        )
        group = HostsGroup(
            hosts,
            HostsParts(
                first=self._within_host(here, "first", in_background),
                last=self._within_host(here, "last", in_background),
                messages=self._within_host(here, "post", activity),
                across=between,
                all_ranks=whole,
            ),
            self._names(ranks),
            activity,
            whole.who_left,
        )
        self._open.append(group)
        return group

    def _names(self, ranks: Sequence[int]) -> list[str]:
        """The name of each of `ranks` in errors: with its host, if they run on several."""
        return [rank_name(rank, self._mesh) + self._transports.where(rank, ranks) for rank in ranks]
