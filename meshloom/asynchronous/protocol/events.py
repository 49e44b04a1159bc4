"""What the head reports: updates, and snapshots, once all servers have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.asynchronous.protocol.messages import ServerReport


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update `version`: the gradient of `share` by `worker`. age: of its parameters. gap: of the clocks."""

    version: int
    worker: int
    share: int
    age: int
    loss: float
    norm: float
    gap: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All servers have kept their parts after update `version`. Reported again when they go on from it."""

    version: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The servers have started at update `version`; updates after it are gone."""

    version: int


Event = Update | Snapshot | Restored


class KeptSnapshots:
    """newest: the newest one of which all `num_servers` servers have kept their parts."""

    def __init__(self, num_servers: int, newest: Snapshot) -> None:
        self.newest = newest
        self._num_servers = num_servers
        # version -> the head's state, and who has kept it
        self._pending: dict[int, tuple[Any, set[int]]] = {}

    def begin(self, version: int, state: Any) -> None:
        """Servers are asked to keep their parts after update `version`. state: the head's."""
        self._pending[version] = state, set()

    def has(self, version: int) -> bool:
        """Whether servers have this snapshot, or have been asked to keep it."""
        return version == self.newest.version or version in self._pending

    def kept(self, version: int, server: int) -> Snapshot | None:
        """A server has kept its part; the snapshot if it was the last."""
        if version not in self._pending:
            return None
        state, servers = self._pending[version]
        servers.add(server)
        if len(servers) < self._num_servers:
            return None
        del self._pending[version]
        self.newest = Snapshot(version=version, state=state)
        return self.newest


def newest_common(reports: Mapping[int, ServerReport]) -> Snapshot:
    """The newest snapshot that all servers have. reports: by server.

    It is of one history: no update is made before all servers go on from it, and have dropped what was after it.
    """
    by_server = [dict(report.snapshots) for report in reports.values()]
    version = max(set[int].intersection(*map(set, by_server)))
    return Snapshot(version=version, state=by_server[0][version])
