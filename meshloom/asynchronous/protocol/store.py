"""One server's part of the parameters: pushes wait until the head orders them.

What the server holds is `Holdings`, rebuilt from a snapshot whenever the servers go back to one.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshloom.asynchronous.protocol.messages import (
    HEAD,
    Address,
    Apply,
    DropPush,
    ParametersPart,
    Push,
    PushStaged,
    ReportRequest,
    Restore,
    SendParameters,
    Sent,
    ServerReport,
    SnapshotKept,
    SnapshotKind,
    TakeSnapshot,
)


class Holdings(Protocol):
    """The parameters, optimizer state and buffers of one server."""

    def apply(self, gradients: Any, changes: Any, *, loss: float, norm: float, rate: float) -> None:
        """One update. loss, norm, rate: as in `Apply`."""
        ...

    def values(self) -> tuple[Any, Any]:
        """Copies of the parameters and of the buffers (None on servers that have none), to be sent."""
        ...

    def snapshot(self) -> Any:
        """All that a later `Holdings` needs to go on from here; an immutable copy."""
        ...


@dataclass(kw_only=True)
class Storage:
    """What survives a killed server. snapshots: kind and content, by version. newest: the newest update."""

    snapshots: MutableMapping[int, tuple[SnapshotKind, Any]]
    newest: int = field(default=0)


class Store:
    """number: of the server. build: creates holdings from a snapshot's content."""

    def __init__(self, number: int, storage: Storage, build: Callable[[Any], Holdings]) -> None:
        self._number = number
        self._storage = storage
        self._build = build
        self._incarnation = -1
        self._holdings: Holdings | None = None
        self._pushes: dict[int, Push] = {}  # by ticket

    def started(self) -> Sent:
        """A server's first messages. Server 0 needs none: its head starts with it, and asks."""
        return [self._back(None)]

    def receive(self, message: Any) -> Sent:
        """A message of a worker or the head."""
        if isinstance(message, ReportRequest):
            return [self._back(message.incarnation)]
        if isinstance(message, Restore):
            return self._restore(message)
        current = message.incarnation == self._incarnation
        if isinstance(message, Push):
            if current:
                self._pushes[message.ticket] = message
            staged = PushStaged(
                server=self._number, incarnation=message.incarnation, worker=message.worker, ticket=message.ticket,
                loss=message.loss, norm=message.norm,
            )  # fmt: skip
            return [(HEAD, staged)]  # of an older incarnation too: the head refuses it
        return self._do(message, self._holdings) if current and self._holdings else []

    def _do(self, message: Any, holdings: Holdings) -> Sent:
        """A decision of the head."""
        match message:
            case Apply():
                push = self._pushes.pop(message.ticket)
                said = {"loss": message.loss, "norm": message.norm, "rate": message.rate}
                holdings.apply(push.gradients, push.changes, **said)
                self._storage.newest = message.version
                return []
            case SendParameters():
                values, buffers = holdings.values()
                part = ParametersPart(
                    server=self._number, incarnation=self._incarnation, ticket=message.ticket, share=message.share,
                    version=message.version, values=values, buffers=buffers,
                )  # fmt: skip
                return [(Address("worker", message.worker), part)]
            case TakeSnapshot():
                snapshots, version = self._storage.snapshots, message.version
                kind = SnapshotKind(incarnation=self._incarnation, state=message.state)
                snapshots[version] = kind, holdings.snapshot()
                for old in [each for each in snapshots if each < message.forget_before]:
                    del snapshots[old]
                of = {"server": self._number, "incarnation": self._incarnation}
                return [(HEAD, SnapshotKept(**of, version=version))]
            case DropPush():
                self._pushes.pop(message.ticket, None)
                return []
            case _:
                raise AssertionError(f"a server does not take {type(message).__name__}")

    def _restore(self, message: Restore) -> Sent:
        storage = self._storage
        for version in [version for version in storage.snapshots if version > message.version]:
            del storage.snapshots[version]  # of updates that are lost
        storage.newest = message.version
        self._incarnation = message.incarnation
        self._holdings = self._build(storage.snapshots[message.version][1])
        self._pushes = {}
        return []

    def _back(self, asked: int | None) -> tuple[Address, ServerReport]:
        snapshots = {version: kind for version, (kind, _) in self._storage.snapshots.items()}
        return HEAD, ServerReport(
            server=self._number, asked=asked, snapshots=snapshots, newest=self._storage.newest
        )
