"""An asynchronous run whose parameters are counts: each update adds one under the share that it is of, so
what was applied how often can be read off.

It runs the product's head, stores, workers and virtual clock. What a run has come to is worked out here from
its events, without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.asynchronous.protocol.events import Event, Restored, Snapshot, Update
from meshloom.asynchronous.protocol.head import Head, Rules, first_state
from meshloom.asynchronous.protocol.store import Storage, Store
from meshloom.asynchronous.protocol.virtual import Parts, VirtualCluster
from meshloom.asynchronous.protocol.worker import Computed, Task


class Counts:
    """Holdings: how often each share was applied."""

    def __init__(self, content: Counter[int] | None) -> None:
        self.counts = Counter(content or {})

    def apply(self, gradients: int, changes: Any, *, loss: float, norm: float, rate: float) -> None:
        assert rate == 1.0
        self.counts[gradients] += 1

    def values(self) -> tuple[int, None]:
        return self.counts.total(), None

    def snapshot(self) -> Counter[int]:
        return Counter(self.counts)


@dataclass
class Account:
    """What a run came to. history: (worker, share) of the updates that survive, in order. lost: updates that
    were gone again."""

    finals: list[Counter[int]]
    history: list[tuple[int, int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    lost: int = 0
    gaps: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    left: int = 0  # workers that were still there at the end
    reported_ages: Counter[int] = field(default_factory=Counter)


def count(
    circumstances: Circumstances,
    *,
    num_servers: int = 1,
    num_workers: int = 4,
    staleness: int | None = None,
    steps: int = 30,
    keep_every: int = 7,
) -> Account:
    """Run to the end."""
    rules = Rules(num_servers=num_servers, staleness=staleness, steps=steps, keep_every=[keep_every])
    storages = [Storage(snapshots={0: (first_state(), None)}) for _ in range(num_servers)]

    computed = set[int]()

    def compute(worker: int, task: Task) -> Computed:
        assert task.share not in computed, "a share was given out twice"
        computed.add(task.share)
        # all of one version, and that is the number of updates
        assert [part.values for part in task.parts] == [task.version] * num_servers
        return Computed(gradients=[task.share] * num_servers, changes=None, loss=float(task.share), norm=0.0)

    parts = Parts(
        head=lambda: Head(rules),
        store=lambda number: Store(number, storages[number], Counts),
        compute=compute,
    )
    cluster = VirtualCluster(parts, circumstances, num_servers=num_servers, num_workers=num_workers)
    account = Account([])
    for event in cluster.run():
        _note(account, event, cluster)
    account.finals = [storage.snapshots[steps][1] for storage in storages]
    account.left = len(cluster._workers)
    account.reported_ages = cluster.head.ages
    return account


def _note(account: Account, event: Event, cluster: VirtualCluster) -> None:
    match event:
        case Update():
            account.history.append((event.worker, event.share))
            account.ages.append(event.age)
            account.gaps.append(event.gap)
            account.versions.append(event.version)
            account.times.append(cluster.seconds)
            assert event.version == len(account.history)
        case Restored():
            account.lost += len(account.history) - event.version
            del account.history[event.version :]
            del account.ages[event.version :]
        case Snapshot():
            account.states[event.version] = event.state


def applied(account: Account) -> list[int]:
    """The shares of the surviving history, in order."""
    return [share for _, share in account.history]


def ahead(history: Sequence[tuple[int, int]], workers: Sequence[int]) -> int:
    """How far apart the numbers of pushes of some workers ever are."""
    pushes = dict.fromkeys(workers, 0)
    widest = 0
    for worker, _ in history:
        if worker in pushes:
            pushes[worker] += 1
            widest = max(widest, max(pushes.values()) - min(pushes.values()))
    return widest
