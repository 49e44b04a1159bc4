"""A worker of an asynchronous run: it joins, computes what it is given at the parameters that it is given,
pushes, and waits for more.

    joining --Part of every server--> computing --Push to every server--> waiting --Part of every server-->
    computing ...
       ^                                                                     |
       +---------------------- Rejoin, or a connection came back ------------+

While it computes it takes messages but does not stop: what came of it is refused later, if it is void.
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
    """Compute share `share` at `parts` (in order of servers), the parameters after update `version`."""

    incarnation: int
    ticket: int
    share: int
    version: int
    parts: Sequence[ParametersPart]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What came of a task. gradients: by server, what it holds of the gradient. changes, loss, norm: as in
    `Push`."""

    gradients: Sequence[Any]
    changes: Any
    loss: float
    norm: float


class Worker:
    """number: its own among the workers of a run. `task` is what it should compute now."""

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
        """A connection to the servers is there, for the first time or again after it was lost, and messages
        with it."""
        return [] if self.task or self.ended else [self._join()]

    def receive(self, message: Any) -> Sent:
        """Of servers and the head."""
        if self.ended:
            return []
        match message:
            case ParametersPart():
                return self._part(message)
            case Rejoin():
                if self.task or message.ticket not in (None, self._pushed[1]):
                    return []
                # a push that came twice is refused twice, and joining twice would make the first lease void
                self._pushed = (-1, -1)
                return [self._join()]
            case Done():
                self.ended = True
                return []
            case _:
                raise AssertionError(f"a worker does not take {type(message).__name__}")

    def computed(self, computed: Computed) -> Sent:
        """The task is done. Its gradient is pushed, unless something newer came meanwhile: then that is the
        task."""
        task, self.task = self.task, None
        assert task is not None
        sent: Sent = []
        if self._newest == (task.incarnation, task.ticket):
            self._pushed = self._newest
            sent = [
                (
                    Address("server", server),
                    Push(
                        worker=self.number, incarnation=task.incarnation, ticket=task.ticket, gradients=gradients,
                        changes=computed.changes if server == 0 else None, loss=computed.loss, norm=computed.norm,
                    ),
                )
                for server, gradients in enumerate(computed.gradients)
            ]  # fmt: skip
        if self._leaving:
            return sent + self.leave()
        self._begin()
        return sent

    def leave(self) -> Sent:
        """End as soon as what is being computed is pushed."""
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
        """Take up the newest ticket, if its parts are there."""
        if len(self._parts) < self._num_servers:
            return
        parts = [self._parts[server] for server in range(self._num_servers)]
        self._parts = {}
        first = parts[0]
        self.task = Task(
            incarnation=first.incarnation,
            ticket=first.ticket,
            share=first.share,
            version=first.version,
            parts=parts,
        )
