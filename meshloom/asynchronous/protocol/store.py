"""One server's part of the parameters: pushes wait until the head orders them.

What the server holds is `Holdings`, built from the snapshot from which all servers go on when they start.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshloom.asynchronous.protocol.messages import (
    HEAD,
    Address,
    Apply,
    DropPush,
    ParametersPart,
    Push,
    PushStaged,
    Restore,
    SendParameters,
    Sent,
    ServerReport,
    SnapshotKept,
    TakeSnapshot,
)


class Holdings(Protocol):
    """The parameters, optimizer state and buffers of one server."""

    def apply(self, gradients: Any, changes: Any, *, loss: float, norm: float, rate: float) -> None:
        """One update. loss, norm: as in `Push`. rate: as in `Apply`."""
        ...

    def values(self) -> tuple[Any, Any]:
        """Copies of the parameters and of the buffers (None on servers that have none), to be sent."""
        ...

    def snapshot(self) -> Any:
        """All that a later `Holdings` needs to go on from here; an immutable copy."""
        ...


@dataclass(kw_only=True)
class Storage:
    """What survives a killed server.

    snapshots: the head's state and this server's content, by version. next_share: as in `ServerReport`.
    """

    snapshots: MutableMapping[int, tuple[Any, Any]]
    next_share: int = 0


class Store:
    """number: of the server. build: creates holdings from a snapshot's content."""

    def __init__(self, number: int, storage: Storage, build: Callable[[Any], Holdings]) -> None:
        self._number = number
        self._storage = storage
        self._build = build
        self._holdings: Holdings  # once the head has all reports
        self._pushes: dict[int, Push] = {}  # by share

    def started(self) -> Sent:
        """The first message."""
        storage = self._storage
        snapshots = [(version, state) for version, (state, _) in storage.snapshots.items()]
        report = ServerReport(server=self._number, snapshots=snapshots, next_share=storage.next_share)
        return [(HEAD, report)]

    def receive(self, message: Any) -> Sent:
        """A message of a worker or the head."""
        match message:
            case Restore():
                snapshots = self._storage.snapshots
                for version in [version for version in snapshots if version > message.version]:
                    del snapshots[version]  # of updates that are lost
                self._holdings = self._build(snapshots[message.version][1])
                return []
            case Push():
                self._pushes[message.share] = message
                staged = PushStaged(
                    server=self._number, worker=message.worker, share=message.share, loss=message.loss, norm=message.norm
                )  # fmt: skip
                return [(HEAD, staged)]  # the head refuses it if its share is not out
            case DropPush():
                self._pushes.pop(message.share, None)
                return []
            case Apply():
                push = self._pushes.pop(message.share)
                said = {"loss": push.loss, "norm": push.norm, "rate": message.rate}
                self._holdings.apply(push.gradients, push.changes, **said)
                return []
            case SendParameters():
                values, buffers = self._holdings.values()
                self._storage.next_share = message.share + 1
                part = ParametersPart(
                    server=self._number, share=message.share, version=message.version, values=values, buffers=buffers
                )  # fmt: skip
                return [(Address("worker", message.worker), part)]
            case TakeSnapshot():
                snapshots, version = self._storage.snapshots, message.version
                snapshots[version] = message.state, self._holdings.snapshot()
                for old in [each for each in snapshots if each < message.forget_before]:
                    del snapshots[old]
                return [(HEAD, SnapshotKept(server=self._number, version=version))]
            case _:
                raise AssertionError(f"a server does not take {type(message).__name__}")
