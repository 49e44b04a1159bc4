"""The messages between workers, servers and the head of an asynchronous run.

Every message consists of a few integers and floats, and of tensors where it says so. `share` is the number of
a share of the data over all epochs. A share is given out once in a run, so it names the push of its gradient too.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Worker -> head: it asks for a share, as its connections are new. An earlier lease of this worker is void."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Worker -> head: no further share. It leaves when the one that it has is pushed, at `Done`."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Push:
    """Worker -> each server: the server's part of the mean gradient over a share.

    gradients: of each slice that the server holds, flat tensors; None was not used.
    changes: of buffers, to server 0 only.
    loss: mean over the share. norm: 2-norm of the whole gradient; NaN if the job does not clip.
    """

    worker: int
    share: int
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
    share: int
    version: int
    values: Any
    buffers: Any


@dataclass(frozen=True, kw_only=True)
class Done:
    """Head -> worker: all updates are done, or those of this worker are."""


@dataclass(frozen=True, kw_only=True)
class PushStaged:
    """Server -> head: its part of a push has arrived."""

    server: int
    worker: int
    share: int
    loss: float
    norm: float


@dataclass(frozen=True, kw_only=True)
class SnapshotKept:
    """Server -> head: its part of the snapshot after update `version` is stored durably."""

    server: int
    version: int


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """Server -> head: its state as it starts.

    snapshots: version, and the head's state as JSON values, of each.
    next_share: the first share for which it has never sent parameters.
    """

    server: int
    snapshots: Sequence[tuple[int, Any]]
    next_share: int


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Head -> server: the push of `share` is the next update. rate: the factor of learning rates in it."""

    share: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class SendParameters:
    """Head -> server: send the worker your part of the current parameters, after update `version`."""

    worker: int
    share: int
    version: int


@dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    """Head -> server: take a snapshot now. state: the head's (JSON). Those before `forget_before` may go."""

    version: int
    state: Any
    forget_before: int


@dataclass(frozen=True, kw_only=True)
class DropPush:
    """Head -> server: forget the push of `share`."""

    share: int


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Head -> server: go on from the snapshot after update `version`."""

    version: int
