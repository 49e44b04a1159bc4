"""A schedule by hand: a function of a step's number, called before that step, in place of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ByHand:
    """Has the methods of a learning-rate scheduler. set_rates: sets what it likes in an optimizer's groups; it is called for
    step 0 at once, and for step n + 1 after step n.

    >>> rates = []
    >>> schedule = ByHand(lambda step: rates.append(0.5**step))
    >>> schedule.step()
    >>> rates
    [1.0, 0.5]
    """

    def __init__(self, set_rates: Callable[[int], object]) -> None:
        self._set_rates, self._steps = set_rates, 0
        set_rates(0)

    def step(self) -> None:
        """Set what the next step uses."""
        self._steps += 1
        self._set_rates(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps done."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after as many steps, with what the function sets for the next one."""
        self._steps = state["steps"]
        self._set_rates(self._steps)


def as_scheduler(returned: Any) -> Any:
    """What a job's scheduler function returned; a function of the step as a scheduler."""
    is_function = callable(returned) and not hasattr(returned, "step") and not isinstance(returned, type)
    return ByHand(returned) if is_function else returned


def is_scheduler(value: Any) -> bool:
    """Whether it has the methods of a learning-rate scheduler."""
    return all(callable(getattr(value, each, None)) for each in ("step", "state_dict", "load_state_dict"))
