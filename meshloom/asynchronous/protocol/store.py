"""One server's part of the parameters: pushes wait until the head orders them.

What the server holds is `Holdings`, rebuilt from a snapshot whenever the servers go back to one.
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
    ReportRequest,
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
        self._holdings: Holdings | None = None
        self._pushes: dict[int, Push] = {}  # by share

    def started(self) -> Sent:
        """A server's first messages. Server 0 needs none: its head starts with it, and asks."""
        return [self._back(None)]

    def receive(self, message: Any) -> Sent:
        """A message of a worker or the head."""
        match message:
            case ReportRequest():
                return [self._back(message.number)]
            case Restore():
                return self._restore(message)
            case Push():
                self._pushes[message.share] = message
                staged = PushStaged(
                    server=self._number, worker=message.worker, share=message.share, loss=message.loss, norm=message.norm
                )  # fmt: skip
                return [(HEAD, staged)]  # the head refuses it if its share is not out
            case DropPush():
                self._pushes.pop(message.share, None)
                return []
            case _:
                return self._do(message, self._holdings) if self._holdings else []

    def _do(self, message: Any, holdings: Holdings) -> Sent:
        """A decision of the head."""
        match message:
            case Apply():
                push = self._pushes.pop(message.share)
                said = {"loss": message.loss, "norm": message.norm, "rate": message.rate}
                holdings.apply(push.gradients, push.changes, **said)
                return []
            case SendParameters():
                values, buffers = holdings.values()
                self._storage.next_share = message.share + 1
                part = ParametersPart(
                    server=self._number, share=message.share, version=message.version, values=values, buffers=buffers
                )  # fmt: skip
                return [(Address("worker", message.worker), part)]
            case TakeSnapshot():
                snapshots, version = self._storage.snapshots, message.version
                snapshots[version] = message.state, holdings.snapshot()
                for old in [each for each in snapshots if each < message.forget_before]:
                    del snapshots[old]
                return [(HEAD, SnapshotKept(server=self._number, version=version))]
            case _:
                raise AssertionError(f"a server does not take {type(message).__name__}")

    def _restore(self, message: Restore) -> Sent:
        storage = self._storage
        for version in [version for version in storage.snapshots if version > message.version]:
            del storage.snapshots[version]  # of updates that are lost
        self._holdings = self._build(storage.snapshots[message.version][1])
        self._pushes = {}
        return []

    def _back(self, asked: int | None) -> tuple[Address, ServerReport]:
        snapshots = {version: state for version, (state, _) in self._storage.snapshots.items()}
        return HEAD, ServerReport(
            server=self._number, asked=asked, snapshots=snapshots, next_share=self._storage.next_share
        )
