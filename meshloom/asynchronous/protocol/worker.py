"""A worker: it joins, computes the gradient of a share at the parameters that it receives, pushes, and waits.

    joining --parts of all servers--> computing --Push to every server--> waiting --parts of all servers--> ...
       ^                                                                     |
       +---------------------- Rejoin, or a connection was restored ---------+

Messages that arrive while it computes do not stop it: a void push is refused later.
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
    Rejoin,
    Sent,
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Compute `share` at `parts` (in order of servers), the parameters after update `version`."""

    incarnation: int
    ticket: int
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
        self._newest = (-1, -1)  # incarnation and ticket of the newest part
        self._parts: dict[int, ParametersPart] = {}  # of the newest ticket, by server
        self._pushed = (-1, -1)
        self._leaving = False

    def connected(self) -> Sent:
        """The servers are connected, for the first time or again: messages may have been lost."""
        return [] if self.task or self.ended else [self._join()]

    def receive(self, message: Any) -> Sent:
        """A message of a server or the head."""
        if self.ended:
            return []
        match message:
            case ParametersPart():
                return self._part(message)
            case Rejoin():
                if self.task or message.ticket not in (None, self._pushed[1]):
                    return []
                # a push that arrived twice is refused twice, and joining twice would void the first lease
                self._pushed = (-1, -1)
                return [self._join()]
            case Done():
                self.ended = True
                return []
            case _:
                raise AssertionError(f"a worker does not take {type(message).__name__}")

    def computed(self, computed: Computed) -> Sent:
        """The task is done: push its gradient, unless a newer lease has arrived meanwhile."""
        task, self.task = self.task, None
        assert task is not None
        sent: Sent = []
        if self._newest == (task.incarnation, task.ticket):
            self._pushed = self._newest
            for server, gradients in enumerate(computed.gradients):
                push = Push(
                    worker=self.number, incarnation=task.incarnation, ticket=task.ticket, gradients=gradients,
                    changes=computed.changes if server == 0 else None, loss=computed.loss, norm=computed.norm,
                )  # fmt: skip
                sent.append((Address("server", server), push))
        if self._leaving:
            return sent + self.leave()
        self._begin()
        return sent

    def leave(self) -> Sent:
        """End as soon as the current task is pushed."""
        self._leaving = True
        if self.task or self.ended:
            return []
        self.ended = True
        return [(HEAD, Leave(worker=self.number, incarnation=self._pushed[0], pushed=self._pushed[1]))]

    def _join(self) -> tuple[Address, Join]:
        return HEAD, Join(worker=self.number)

    def _part(self, part: ParametersPart) -> Sent:
        key = (part.incarnation, part.ticket)
        if key < self._newest or key == self._pushed:
            return []
        if key > self._newest:
            self._newest, self._parts = key, {}
        self._parts[part.server] = part
        if self.task is None:
            self._begin()
        return []

    def _begin(self) -> None:
        """Begin the newest ticket, if all its parts have arrived."""
        if len(self._parts) < self._num_servers:
            return
        parts = [self._parts[server] for server in range(self._num_servers)]
        self._parts = {}
        (incarnation, ticket), first = self._newest, parts[0]
        self.task = Task(
            incarnation=incarnation, ticket=ticket, share=first.share, version=first.version, parts=parts
        )
