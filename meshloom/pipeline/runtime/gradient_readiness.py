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
    each_microbatch: `ready` is called for each microbatch instead, for all parameters.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        ready: Callable[[nn.Parameter], None],
        *,
        each_microbatch: bool = False,
    ) -> None:
        self._parameters = parameters
        self._ready = ready
        self._each_microbatch = each_microbatch
        last = {
            (action.stage, action.microbatch if each_microbatch else 0): action
            for action in schedule.actions[rank]
            if action.kind != "F"
        }
        self._last = set(last.values())  # of a stage, or of a stage and microbatch
        self._users: dict[int, set[int]] = {}
        for stage, used in parameters.items():
            for parameter in used:
                self._users.setdefault(id(parameter), set()).add(stage)
        self._ended: dict[int, int] = {}  # stage -> its last backwards that have ended
        self._told: dict[int, int] = {}  # parameter -> how often it was ready
        self._closing: int | None = None

    def begin(self) -> None:
        """Resets the state, before the first action of a step."""
        self._ended, self._told = dict.fromkeys(self._parameters, 0), dict.fromkeys(self._users, 0)
        self._closing = None

    def arrived(self, parameter: nn.Parameter) -> None:
        """Gradient hook: autograd has accumulated the gradient of the current backward."""
        if self._closing is not None and self._closing in self._users.get(id(parameter), ()):
            self._tell(parameter, closing=self._closing)

    def began(self, action: Action) -> None:
        self._closing = action.stage if action.kind == "B" and action in self._last else None

    def ended(self, action: Action) -> None:
        self._closing = None
        if action not in self._last:
            return
        self._ended[action.stage] += 1
        for parameter in reversed(self._parameters[action.stage]):
            self._tell(parameter)

    def _tell(self, parameter: nn.Parameter, closing: int | None = None) -> None:
        """Calls `ready` if the parameter is complete once more. closing: a stage whose backward is about to
        end."""
        ended = min(self._ended[stage] + (stage == closing) for stage in self._users[id(parameter)])
        if ended > self._told[id(parameter)]:
            self._told[id(parameter)] = ended
            if self._each_microbatch or parameter.grad is not None:
                self._ready(parameter)
