"""An optimizer's state in host memory, where the parameters are on a GPU: it steps on their twins on the host.

    GPU -> host     gradients, values 1 | gradients, values 2 | gradients, values 3 |
    host                                | step 1              | step 2              | step 3   |
    host -> GPU                                               | values 1            | values 2 | values 3 |

A *twin* has its parameter's shape, and values while its window is updated: windows take turns in two pieces of pinned
memory. So the host holds the state and two windows, and parameters are the device's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.device.lanes import Lane, Wait
from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes, round_up
from meshloom.optimizer.offload.offloaded_state import OffloadedState
from meshloom.optimizer.offload.windows import (
    WINDOW_BYTES,
    Window,
    all_windows,
    parameters_of,
    step_in_windows,
)

ALIGNMENT = 64  # bytes, of a tensor in a window's memory


class StateOnHost(OffloadedState):
    """The optimizers' state, in host memory. Takes the place of each parameter in their groups by its twin.

    in_windows: whether each optimizer may be stepped in windows. device: of the parameters. down, up: from the device
    to the host, and back. Raises `PlanError` for an optimizer that updates on GPUs only.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        in_windows: Sequence[bool],
        device: torch.device,
        down: Lane,
        up: Lane,
    ) -> None:
        self._device, self._down, self._up = device, down, up
        self._of_twin: dict[nn.Parameter, nn.Parameter] = {}
        self._twins: dict[nn.Parameter, nn.Parameter] = {}
        for optimizer in optimizers:
            if any(group.get("capturable") for group in optimizer.param_groups):
                raise PlanError(
                    f"offload=optimizer updates on the host, and {type(optimizer).__name__}(capturable=True) updates on GPUs only. Leave capturable out, or "
                    "leave offload out."
                )
            self._take_twins(optimizer)
        self._windows = all_windows(optimizers, in_windows, WINDOW_BYTES)
        sizes = [
            sum(round_up(each.nbytes, ALIGNMENT) for each in self._parameters(optimizer, window))
            for optimizer in optimizers
            for window in self._windows[id(optimizer)]
        ]
        most, count = max(sizes, default=0), 2 if len(sizes) > len(optimizers) else 1
        self._rooms = [down.memory([2 * most], torch.uint8) for _ in range(count)]
        self._left: list[Wait] = [lambda: None] * count  # by room, until its values are the device's

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._twins[parameter]

    def step(self, optimizer: Optimizer) -> None:
        """One update from the gradients on the device, which computes with the new values afterwards."""
        windows = self._windows[id(optimizer)]
        twins = [parameters_of(optimizer, window) for window in windows]
        self._down.after_computation()
        arrived: list[Wait] = []  # by window

        def step(number: int, update: Any) -> None:
            if number == 0:
                arrived.append(self._fetch(0, twins[0]))
            arrived[number]()
            if number + 1 < len(windows):
                arrived.append(self._fetch(number + 1, twins[number + 1]))
            update()
            for twin in twins[number]:
                self._up.copy(self._of_twin[twin].data, twin.data)
            self._left[number % len(self._rooms)] = self._up.mark()

        try:
            step_in_windows(optimizer, windows, step)
        finally:
            for twin in (each for window in twins for each in window):
                twin.data, twin.grad = _without_memory(twin), None
            self._up.before_computation()

    def notes(self) -> list[str]:
        staged = sum(each.nbytes for each in self._rooms)
        return [
            f"Optimizer state is in host memory, where updates are made; {format_bytes(staged)} of pinned memory carry gradients and values of this rank."
        ]

    def _take_twins(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                twin = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
                self._of_twin[twin], self._twins[parameter] = parameter, twin
                group["params"][index] = twin
                if parameter in optimizer.state:
                    optimizer.state[twin] = optimizer.state.pop(parameter)
        for place in (*optimizer.param_groups, vars(optimizer), *optimizer.state.values()):
            for each in place.values() if isinstance(place, dict) else ():  # pyright: ignore[reportUnnecessaryIsInstance]
                if isinstance(each, Tensor) and each.device.type != "cpu":
                    each.data = each.data.cpu()  # it stays the same tensor: a scheduler may hold it

    def _parameters(self, optimizer: Optimizer, window: Window) -> Iterator[nn.Parameter]:
        return (self._of_twin[each] for each in parameters_of(optimizer, window))

    def _fetch(self, number: int, twins: Sequence[nn.Parameter]) -> Wait:
        """Gives the twins of a window memory, and sends values and gradients there."""
        index, at = number % len(self._rooms), 0
        self._left[index]()
        room = self._rooms[index]
        for twin in twins:
            parameter = self._of_twin[twin]
            values, at = _part(room, at, parameter)
            self._down.copy(values, parameter.data)
            twin.data = values
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                twin.grad = None if gradient is None else gradient.cpu()  # rows, which it waits for
                continue
            received, at = _part(room, at, parameter)
            self._down.copy(received, gradient)
            twin.grad = received
        return self._down.mark()


def _part(room: Tensor, start: int, like: Tensor) -> tuple[Tensor, int]:
    """A tensor like `like` that begins at a byte of `room`, and where the next one may begin."""
    stop = start + like.nbytes
    return room[start:stop].view(like.dtype).view(like.shape), start + round_up(like.nbytes, ALIGNMENT)


def _without_memory(like: Tensor) -> Tensor:
    """A tensor on the host of the same shape, all of whose elements are one."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape)
