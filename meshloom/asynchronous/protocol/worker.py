"""A worker: it joins, computes the gradient of a share at the parameters that it receives, pushes, and waits.

    joining --parts of all servers--> computing --Push to every server--> waiting --parts of all servers--> ...
       ^                                 |                                   |
       +---------------------------------+-- a connection was restored ------+

A push of a lease that is void is refused, and has no other effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.asynchronous.protocol.messages import (
    HEAD,
    Address,
    Done,
    Join,
    Leave,
    ParametersPart,
    Push,
    Sent,
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Compute `share` at `parts` (in order of servers), the parameters after update `version`."""

    share: int
    version: int
    parts: Sequence[ParametersPart]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The result of a task. gradients: each server's part. changes, loss, norm: as in `Push`."""

    gradients: Sequence[Any]
    changes: Any
    loss: float
    norm: float


class Worker:
    """number: of the worker. task: what it computes now."""

    def __init__(self, number: int, num_servers: int) -> None:
        self.number = number
        self.task: Task | None = None
        self.ended = False
        self._num_servers = num_servers
        self._newest = -1  # share of the newest part
        self._parts: dict[int, ParametersPart] = {}  # of the newest share, by server
        self._leaving = False

    def connected(self) -> Sent:
        """The servers are connected, for the first time or again: messages may have been lost, and what it had is void."""
        self.task, self._parts = None, {}
        self.ended = self.ended or self._leaving
        return [] if self.ended else [(HEAD, Join(worker=self.number))]

    def receive(self, message: Any) -> Sent:
        """A message of a server or the head."""
        if self.ended:
            return []
        match message:
            case ParametersPart():
                return self._part(message)
            case Done():
                self.ended = True
                return []
            case _:
                raise AssertionError(f"a worker does not take {type(message).__name__}")

    def computed(self, computed: Computed) -> Sent:
        """The task is done: push its gradient."""
        task, self.task = self.task, None
        assert task is not None
        sent: Sent = []
        for server, gradients in enumerate(computed.gradients):
            changes = computed.changes if server == 0 else None
            push = Push(
                worker=self.number, share=task.share, gradients=gradients, changes=changes, loss=computed.loss, norm=computed.norm
            )  # fmt: skip
            sent.append((Address("server", server), push))
        self._begin()
        return sent

    def leave(self) -> Sent:
        """End as soon as the share that is out is pushed."""
        self._leaving = True
        return [] if self.ended else [(HEAD, Leave(worker=self.number))]

    def _part(self, part: ParametersPart) -> Sent:
        if part.share < self._newest:
            return []
        if part.share > self._newest:
            self._newest, self._parts = part.share, {}
        self._parts[part.server] = part
        if self.task is None:
            self._begin()
        return []

    def _begin(self) -> None:
        """Begin the newest share, if all its parts have arrived."""
        if len(self._parts) < self._num_servers:
            return
        parts = [self._parts[server] for server in range(self._num_servers)]
        self._parts = {}
        self.task = Task(share=self._newest, version=parts[0].version, parts=parts)
