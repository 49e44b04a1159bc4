"""One server's part of the parameters: pushes wait until the head gives them their place, and everything is
done in the order of the head.

What the server holds is `Holdings`, made anew from a snapshot whenever the servers go back to one.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshloom.asynchronous.protocol.messages import (
    HEAD,
    Address,
    Apply,
    Back,
    Drop,
    Give,
    Keep,
    ParametersPart,
    Push,
    PushStaged,
    ReportRequest,
    Restore,
    Sent,
    SnapshotKept,
    SnapshotKind,
)


class Holdings(Protocol):
    """Parameters, the optimizer's state and buffers, as far as a server holds them."""

    def apply(self, gradients: Any, changes: Any, *, loss: float, norm: float, rate: float) -> None:
        """Make one update. loss, norm, rate: as in `Apply`."""
        ...

    def values(self) -> tuple[Any, Any]:
        """Copies of the parameters and of the buffers (None on servers that have none), to be sent."""
        ...

    def snapshot(self) -> Any:
        """All that a later `Holdings` needs to go on from here; it does not change any more."""
        ...


@dataclass(kw_only=True)
class Storage:
    """What survives a server that is killed. snapshots: by version, of what kind and what is in it. newest:
    the newest update that was made."""

    snapshots: MutableMapping[int, tuple[SnapshotKind, Any]]
    newest: int = field(default=0)


class Store:
    """number: of the server. build: makes holdings of a snapshot's content."""

    def __init__(self, number: int, storage: Storage, build: Callable[[Any], Holdings]) -> None:
        self._number = number
        self._storage = storage
        self._build = build
        self._incarnation = -1
        self._holdings: Holdings | None = None
        self._pushes: dict[int, Push] = {}  # by ticket

    def started(self) -> Sent:
        """What a server says first. Server 0 need not: its head starts with it, and asks."""
        return [self._back(None)]

    def receive(self, message: Any) -> Sent:
        """Of workers and the head."""
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
            return [(HEAD, staged)]  # one of an older incarnation too: it is the head that refuses
        return self._do(message, self._holdings) if current and self._holdings else []

    def _do(self, message: Any, holdings: Holdings) -> Sent:
        """What the head has decided."""
        match message:
            case Apply():
                push = self._pushes.pop(message.ticket)
                holdings.apply(
                    push.gradients, push.changes, loss=message.loss, norm=message.norm, rate=message.rate
                )
                self._storage.newest = message.version
                return []
            case Give():
                values, buffers = holdings.values()
                part = ParametersPart(
                    server=self._number, incarnation=self._incarnation, ticket=message.ticket, share=message.share,
                    version=message.version, values=values, buffers=buffers,
                )  # fmt: skip
                return [(Address("worker", message.worker), part)]
            case Keep():
                kept = self._storage.snapshots
                kept[message.version] = (
                    SnapshotKind(incarnation=self._incarnation, state=message.state),
                    holdings.snapshot(),
                )
                for version in [version for version in kept if version < message.forget_before]:
                    del kept[version]
                return [
                    (
                        HEAD,
                        SnapshotKept(
                            server=self._number, incarnation=self._incarnation, version=message.version
                        ),
                    )
                ]
            case Drop():
                self._pushes.pop(message.ticket, None)
                return []
            case _:
                raise AssertionError(f"a server does not take {type(message).__name__}")

    def _restore(self, message: Restore) -> Sent:
        storage = self._storage
        for version in [version for version in storage.snapshots if version > message.version]:
            del storage.snapshots[version]  # of updates that are no longer part of the history
        storage.newest = message.version
        self._incarnation = message.incarnation
        self._holdings = self._build(storage.snapshots[message.version][1])
        self._pushes = {}
        return []

    def _back(self, asked: int | None) -> tuple[Address, Back]:
        snapshots = {version: kind for version, (kind, _) in self._storage.snapshots.items()}
        return HEAD, Back(server=self._number, asked=asked, snapshots=snapshots, newest=self._storage.newest)
