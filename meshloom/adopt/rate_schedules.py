"""A schedule of adopted scripts that is stepped once in many steps."""

from __future__ import annotations

from typing import Any


class OnceIn:
    """A scheduler that is stepped once in so many steps, as one that a script steps after each epoch.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    >>> schedule = OnceIn(2, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    >>> for _ in range(3):
    ...     optimizer.step()
    ...     schedule.step()
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """

    def __init__(self, steps: int, scheduler: Any) -> None:
        self._every, self._scheduler, self._steps = steps, scheduler, 0

    def step(self) -> None:
        """Count a step, and step the scheduler if it is its turn."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps done, and the scheduler's state."""
        return {"steps": self._steps, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps = state["steps"]
        self._scheduler.load_state_dict(state["scheduler"])
