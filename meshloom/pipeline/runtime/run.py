"""Runs one rank's list of actions: forwards and backwards of its stages, with their messages.

    before an action    start the receives that come first in the pairs' orders; wait for what the action needs
    after it            start its sends without waiting; their memory is freed when they complete

A microbatch's memory is freed after its backward. Between first forward and last backward is no collective.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.core.mesh import Axis
from meshloom.pipeline.runtime.point_to_point import Edge, StageMessage, Step, message_of, steps_of
from meshloom.pipeline.runtime.stage import StageRun
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.stages.stages import Crossing
from meshloom.program.ir.nodes import Meta

Sent = Mapping[Axis, Mapping[str, int]]  # axis -> kind of operation -> bytes


class ActionListener(Protocol):
    """Is notified when actions begin and end."""

    def began(self, action: Action) -> None:
        """The action's inputs have arrived."""
        ...

    def ended(self, action: Action) -> None:
        """The action has run; its sends have not started."""
        ...


class PipelineRun:
    """One rank's part of a step, or of an evaluation, for microbatches of given shapes.

    group: the ranks along pp. stages: this rank's, by number.
    crossings: [microbatch], the values exchanged between stages, for its shapes.
    meet: called after each action, also for those of other replicas alone; None: replicas do not meet. of_others: how many actions only
        other replicas have before each of this rank's actions, and at the end. sent: by a run.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        stages: Mapping[int, StageRun],
        crossings: Sequence[Sequence[Crossing]],
        device: torch.device,
        *,
        meet: Callable[[], None] | None = None,
        of_others: Sequence[int] = (),
        sent: Sent | None = None,
    ) -> None:
        self._group = group
        self.sent = sent or {}
        self._ranks = schedule.ranks
        self._stages = stages
        self._device = device
        self.actions = schedule.actions[group.rank]
        self._values = _values_of(crossings, schedule)
        steps = _steps(schedule, tuple(_edges(crossings)))[group.rank]
        passed, *after = of_others or [0] * (len(steps) + 1)
        # what is called before the first action, and after each
        self._first = [meet] * passed if meet else []
        meets = [[meet] * (1 + number) if meet else [] for number in after]
        self._steps = [
            (step, _body(step.action, stages), each) for step, each in zip(steps, meets, strict=True)
        ]

    def run(self, listeners: Sequence[ActionListener] = ()) -> None:
        """Runs all actions in order."""
        try:
            self._run(listeners)
        finally:
            for stage in self._stages.values():
                stage.clear()

    def _run(self, listeners: Sequence[ActionListener]) -> None:
        receiving: dict[StageMessage, tuple[list[Work], dict[str, Tensor]]] = {}
        sending: deque[tuple[Work, Tensor]] = deque()
        for meet in self._first:
            meet()
        for step, body, meets in self._steps:
            for message in step.receives:
                receiving[message] = self._receive(message)
            for message in step.awaits:
                works, tensors = receiving.pop(message)
                for work in works:
                    work.wait()
                self._deliver(message, tensors)
            for each in listeners:
                each.began(step.action)
            produced = body(step.action.microbatch)
            for each in reversed(listeners):  # before gradients are exchanged: the action itself is over
                each.ended(step.action)
            for message in step.stays:
                self._deliver(message, {name: produced[name] for name, _ in self._values[message]})
            for message, is_send in step.posts:
                if is_send:
                    self._send(message, produced, sending)
                else:
                    receiving[message] = self._receive(message)
            del produced  # what was sent ends with its send
            while sending and sending[0][0].is_finished():
                sending.popleft()[0].wait()
            for meet in meets:
                meet()
        while sending:
            sending.popleft()[0].wait()

    def _receive(self, message: StageMessage) -> tuple[list[Work], dict[str, Tensor]]:
        source = self._ranks[message.source]
        tensors = {name: empty_as(meta, self._device) for name, meta in self._values[message]}
        return [self._group.recv(flat_memory(tensor), source) for tensor in tensors.values()], tensors

    def _send(
        self, message: StageMessage, produced: Mapping[str, Tensor], sending: deque[tuple[Work, Tensor]]
    ) -> None:
        for name, meta in self._values[message]:
            value = produced[name]
            if value.stride() != meta.stride:
                value = empty_as(meta, value.device).copy_(value)
            flat = flat_memory(value)
            sending.append((self._group.send(flat, self._ranks[message.destination]), flat))

    def _deliver(self, message: StageMessage, tensors: Mapping[str, Tensor]) -> None:
        stage = self._stages[message.destination]
        if message.destination > message.source:
            stage.receive(message.microbatch, tensors)
        else:
            stage.receive_gradients(message.microbatch, tensors)


@lru_cache(maxsize=64)  # a loop's calls ask for the same ones
def _steps(schedule: Schedule, edges: tuple[Edge, ...]) -> tuple[tuple[Step, ...], ...]:
    return steps_of(schedule, edges)


def _body(action: Action, stages: Mapping[int, StageRun]) -> Callable[[int], Mapping[str, Tensor]]:
    stage = stages[action.stage]
    bodies = {
        "F": stage.forward,
        "B": stage.backward,
        "I": stage.input_gradients,
        "W": stage.weight_gradients,
    }
    return bodies[action.kind]


def _values_of(
    crossings: Sequence[Sequence[Crossing]], schedule: Schedule
) -> Mapping[StageMessage, list[tuple[str, Meta]]]:
    """Message -> its tensors, in order. Empty for messages that only microbatches of other sizes have."""
    found: defaultdict[StageMessage, list[tuple[str, Meta]]] = defaultdict(list)
    for microbatch, of_size in enumerate(crossings):
        for each in of_size:
            value = each.value, each.meta
            found[message_of(schedule, each.source, each.destination, microbatch)].append(value)
            if each.meta.requires_grad:
                found[message_of(schedule, each.destination, each.source, microbatch)].append(value)
    return found


def _edges(crossings: Sequence[Sequence[Crossing]]) -> list[Edge]:
    back: dict[tuple[int, int], bool] = {}
    for of_size in crossings:
        for each in of_size:
            key = each.source, each.destination
            back[key] = back.get(key, False) or each.meta.requires_grad
    return [Edge(*key, requires) for key, requires in sorted(back.items())]


def empty_as(meta: Meta, device: torch.device) -> Tensor:
    """What a value of this shape is received in."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def flat_memory(tensor: Tensor) -> Tensor:
    """The tensor's dense memory, flat."""
    return tensor.as_strided((tensor.numel(),), (1,))
