"""Detects when a parameter's gradient is complete: after the last backward of this rank that uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from meshloom.pipeline.schedules.schedule import Action, Schedule


class Readiness:
    """A listener of a pipeline's run, and a gradient hook of its parameters.

    parameters: stage of this rank -> the parameters that it uses.
    ready: called once a step for each parameter with a gradient, as soon as it is complete: within the last
        backward if only one stage uses it.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        ready: Callable[[nn.Parameter], None],
    ) -> None:
        self._parameters = parameters
        self._ready = ready
        self._last = {action.stage: action for action in schedule.actions[rank] if action.kind != "F"}
        self._users: dict[int, set[int]] = {}
        for stage, used in parameters.items():
            for parameter in used:
                self._users.setdefault(id(parameter), set()).add(stage)
        self._waiting: dict[int, set[int]] = {}
        self._closing: int | None = None

    def begin(self) -> None:
        """Resets the state, before the first action of a step."""
        self._waiting = {key: set(stages) for key, stages in self._users.items()}
        self._closing = None

    def arrived(self, parameter: nn.Parameter) -> None:
        """Gradient hook: autograd has accumulated the gradient of the current backward."""
        if self._closing is not None and self._waiting.get(id(parameter)) == {self._closing}:
            del self._waiting[id(parameter)]
            self._ready(parameter)

    def began(self, action: Action) -> None:
        self._closing = action.stage if action.kind == "B" and action == self._last[action.stage] else None

    def ended(self, action: Action) -> None:
        self._closing = None
        if action != self._last.get(action.stage):
            return
        for parameter in reversed(self._parameters[action.stage]):
            waits = self._waiting.get(id(parameter))
            if waits is None:
                continue
            waits.discard(action.stage)
            if not waits:
                del self._waiting[id(parameter)]
                if parameter.grad is not None:
                    self._ready(parameter)
