"""What workers, servers and the head of an asynchronous run say to each other.

Every message is a few integers and floats, and tensors where it says so: nothing else has to be sent.
`ticket` is the head's number of a lease (a share of the data that a worker is to compute), different for
every lease of an incarnation; `incarnation` counts the times that servers went back to a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Address(NamedTuple):
    """Who a message is for."""

    kind: Literal["head", "server", "worker"]
    number: int = 0


HEAD = Address("head")
Sent = list[tuple[Address, Any]]  # messages and whom they are for, in order


@dataclass(frozen=True, kw_only=True)
class Join:
    """Worker -> head: give me work. What was given to this worker before will not be done."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Worker -> head: I go. pushed: the newest ticket that I have pushed (-1: none), which still counts;
    anything newer I give back."""

    worker: int
    incarnation: int
    pushed: int


@dataclass(frozen=True, kw_only=True)
class Push:
    """Worker -> each server: the mean gradient over a share of the data, as far as the server holds the
    parameters.

    gradients: of each slice that the server holds, flat tensors; None was not used. changes: of buffers, to
        server 0 only.
    loss: mean over the share. norm: 2-norm of the whole gradient, all servers' parts together; NaN if the job
        does not clip.
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
    """Server -> worker: compute share `share` at the parameters after update `version`, of which these are
    mine.

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
    """Head -> worker: join again. ticket: the push that was refused, which may be an old one; None: whatever
    you wait for will not come."""

    ticket: int | None


@dataclass(frozen=True, kw_only=True)
class Done:
    """Head -> worker: all updates are made."""


@dataclass(frozen=True, kw_only=True)
class PushStaged:
    """Server -> head: my part of a push is here."""

    server: int
    incarnation: int
    worker: int
    ticket: int
    loss: float
    norm: float


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Server -> head: my part of a push is not finite, and I have not kept it."""

    server: int
    worker: int


@dataclass(frozen=True, kw_only=True)
class SnapshotKept:
    """Server -> head: my part of the snapshot after update `version` is in a safe place."""

    server: int
    incarnation: int
    version: int


@dataclass(frozen=True, kw_only=True)
class SnapshotKind:
    """A snapshot that a server has. incarnation: in which it was taken. state: the head's, as JSON values."""

    incarnation: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class Back:
    """Server -> head: what I have. asked: the incarnation of the `ReportRequest` that this answers; None: I
    have just started.

    snapshots: by version. newest: the newest update that I ever made, also before I was killed; server 0's is
        the history's.
    """

    server: int
    asked: int | None
    snapshots: Mapping[int, SnapshotKind]
    newest: int


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """Head -> server: say what you have (`Back`)."""

    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Head -> server: the push of `ticket` is update `version`. rate: what the learning rates are multiplied
    by in it."""

    incarnation: int
    worker: int
    ticket: int
    version: int
    loss: float
    norm: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class Give:
    """Head -> server: send the worker your part of the parameters as they are now, after update `version`."""

    incarnation: int
    worker: int
    ticket: int
    share: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Head -> server: take a snapshot now, after update `version`. state: the head's, as JSON values. Older
    ones than `forget_before` may go."""

    incarnation: int
    version: int
    state: Any
    forget_before: int


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Head -> server: forget the push of `ticket`."""

    incarnation: int
    worker: int
    ticket: int


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Head -> server: go back to the snapshot after update `version`; this is incarnation `incarnation`."""

    incarnation: int
    version: int
