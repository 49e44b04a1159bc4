"""The messages between workers, servers and the head of an asynchronous run.

Every message consists of a few integers and floats, and of tensors where it says so. `ticket` is the head's
number of a lease (a share of the data that a worker is to compute), unique in an incarnation; `incarnation`
counts how often servers went back to a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Address(NamedTuple):
    """The receiver of a message."""

    kind: Literal["head", "server", "worker"]
    number: int = 0


HEAD = Address("head")
Sent = list[tuple[Address, Any]]  # messages with their receivers, in order


@dataclass(frozen=True, kw_only=True)
class Join:
    """Worker -> head: it asks for a share. Earlier leases of this worker are void."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Worker -> head: it leaves. pushed: its newest ticket that still counts; -1: none."""

    worker: int
    incarnation: int
    pushed: int


@dataclass(frozen=True, kw_only=True)
class Push:
    """Worker -> each server: the server's part of the mean gradient over a share of the data.

    gradients: of each slice that the server holds, flat tensors; None was not used.
    changes: of buffers, to server 0 only.
    loss: mean over the share. norm: 2-norm of the whole gradient; NaN if the job does not clip.
    """

    worker: int
    incarnation: int
    ticket: int
    gradients: Any
    changes: Any
    loss: float
    norm: float


@dataclass(frozen=True, kw_only=True)
class ParametersPart:
    """Server -> worker: compute `share` at the parameters after update `version`, of which this is a part.

    values: flat tensors, of each slice that the server holds. buffers: by name, from server 0 only.
    """

    server: int
    incarnation: int
    ticket: int
    share: int
    version: int
    values: Any
    buffers: Any


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """Head -> worker: join again. ticket: of a refused push; None: the awaited parameters will not arrive."""

    ticket: int | None


@dataclass(frozen=True, kw_only=True)
class Done:
    """Head -> worker: all updates are done."""


@dataclass(frozen=True, kw_only=True)
class PushStaged:
    """Server -> head: its part of a push has arrived."""

    server: int
    incarnation: int
    worker: int
    ticket: int
    loss: float
    norm: float


@dataclass(frozen=True, kw_only=True)
class NotFinitePush:
    """Server -> head: its part of a push is not finite, and was dropped."""

    server: int
    worker: int


@dataclass(frozen=True, kw_only=True)
class SnapshotKept:
    """Server -> head: its part of the snapshot after update `version` is stored durably."""

    server: int
    incarnation: int
    version: int


@dataclass(frozen=True, kw_only=True)
class SnapshotKind:
    """A snapshot that a server has. incarnation: in which it was taken. state: the head's, as JSON values."""

    incarnation: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """Server -> head: its state.

    asked: the incarnation of the `ReportRequest` that this answers; None: it has just started.
    snapshots: by version.
    newest: the newest update that it has ever done; that of server 0 counts for the run.
    """

    server: int
    asked: int | None
    snapshots: Mapping[int, SnapshotKind]
    newest: int


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """Head -> server: send a `ServerReport`."""

    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Head -> server: the push of `ticket` is update `version`. rate: the factor of learning rates in it."""

    incarnation: int
    worker: int
    ticket: int
    version: int
    loss: float
    norm: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class SendParameters:
    """Head -> server: send the worker your part of the current parameters, after update `version`."""

    incarnation: int
    worker: int
    ticket: int
    share: int
    version: int


@dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    """Head -> server: take a snapshot now. state: the head's (JSON). Those before `forget_before` may go."""

    incarnation: int
    version: int
    state: Any
    forget_before: int


@dataclass(frozen=True, kw_only=True)
class DropPush:
    """Head -> server: forget the push of `ticket`."""

    incarnation: int
    worker: int
    ticket: int


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Head -> server: go back to the snapshot after update `version`; this is incarnation `incarnation`."""

    incarnation: int
    version: int
