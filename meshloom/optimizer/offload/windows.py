"""An optimizer's update in windows: `step` is called several times, each time for a few of the parameters.

    step             [ a b c d e f ]              all state is used at once
    in windows       [ a b ] [ c ] [ d e f ]      the state of a window is used, then that of the next

It is for optimizers that update each parameter by itself. What belongs to no parameter (a count of steps in a group)
changes once: every window begins with what it was before the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

WINDOW_BYTES = 16 * 2**20  # of parameters
_NOT_SHARED = ("params", "param_names", "param_groups", "state", "defaults")

# of each group, the indices of parameters
Window = Sequence[range]


def windows_of(optimizer: Optimizer, num_bytes: int = WINDOW_BYTES) -> list[Window]:
    """Consecutive parameters of up to `num_bytes` together, or a single larger one.

    >>> import torch
    >>> parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 2, 9, 1)]
    >>> optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}])
    >>> windows_of(optimizer, 16)
    [[range(0, 1), range(0, 1)], [range(0, 0), range(1, 2)], [range(0, 0), range(2, 3)]]
    """
    groups = [group["params"] for group in optimizer.param_groups]
    windows: list[Window] = []
    window, held = [range(0)] * len(groups), 0
    for number, parameters in enumerate(groups):
        for index, parameter in enumerate(parameters):
            if held and held + parameter.nbytes > num_bytes:
                windows.append(window)
                window, held = [range(0)] * len(groups), 0
            before = window[number]
            window[number] = range(before.start if before else index, index + 1)
            held += parameter.nbytes
    return [*windows, window]


def all_windows(
    optimizers: Sequence[Optimizer], in_windows: Sequence[bool], num_bytes: int
) -> dict[int, list[Window]]:
    """By id of the optimizer, its windows of up to `num_bytes`. in_windows: whether it may be stepped so; otherwise it
    has one, of all its parameters."""
    return {
        id(each): windows_of(each, num_bytes)
        if whether
        else [[range(len(group["params"])) for group in each.param_groups]]
        for each, whether in zip(optimizers, in_windows, strict=True)
    }


def parameters_of(optimizer: Optimizer, window: Window) -> list[nn.Parameter]:
    """The parameters of a window."""
    groups = zip(optimizer.param_groups, window, strict=True)
    return [group["params"][index] for group, indices in groups for index in indices]


def step_in_windows(
    optimizer: Optimizer,
    windows: Sequence[Window],
    step: Callable[[int, Callable[[], Any]], None] | None = None,
) -> None:
    """One update of all parameters. step: receives the number of each window and what updates it."""
    if len(windows) == 1:
        step(0, optimizer.step) if step else optimizer.step()
        return
    lists = [(group, name, list(group[name])) for group in optimizer.param_groups for name in _listed(group)]
    places: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *optimizer.param_groups]
    before = [_values(place) for place in places]
    try:
        for number, window in enumerate(windows):
            if number:
                for place, values in zip(places, before, strict=True):
                    _restore(place, values)
            of_group = {id(group): each for group, each in zip(optimizer.param_groups, window, strict=True)}
            for group, name, everything in lists:
                indices = of_group[id(group)]
                group[name][:] = everything[indices.start : indices.stop]
            step(number, optimizer.step) if step else optimizer.step()
    finally:
        for group, name, everything in lists:
            group[name][:] = everything


def _listed(group: dict[str, Any]) -> list[str]:
    return [name for name in ("params", "param_names") if name in group]


def _shared(place: dict[Any, Any]) -> list[Any]:
    """The keys of what belongs to no parameter."""
    return [key for key in place if not isinstance(key, Tensor) and key not in _NOT_SHARED]


def _values(place: dict[Any, Any]) -> dict[Any, tuple[Any, Tensor | None]]:
    """What belongs to no parameter; of tensors, also a copy of their values."""
    values = {key: place[key] for key in _shared(place)}
    return {key: (each, each.clone() if isinstance(each, Tensor) else None) for key, each in values.items()}


def _restore(place: dict[Any, Any], values: dict[Any, tuple[Any, Tensor | None]]) -> None:
    for key in _shared(place):
        if key not in values:
            del place[key]
    for key, (value, bits) in values.items():
        place[key] = value if bits is None else value.copy_(bits)
