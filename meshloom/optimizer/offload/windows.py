"""An optimizer's update in windows: `step` is called several times, each time for a few of the parameters.

    step             [ a b c d e f ]              all state is used at once
    in windows       [ a b ] [ c ] [ d e f ]      the state of a window is used, then that of the next

It is for optimizers of torch's own classes, which update each parameter by itself and change nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

WINDOW_BYTES = 16 * 2**20  # of parameters

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
    optimizer: Optimizer, windows: Sequence[Window], step: Callable[[int, Callable[[], Any]], None]
) -> None:
    """One update of all parameters. step: receives the number of each window and what updates it."""
    if len(windows) == 1:
        step(0, optimizer.step)
        return
    names = ("params", "param_names")
    lists = [
        (group, name, list(group[name]))
        for group in optimizer.param_groups
        for name in names
        if name in group
    ]
    try:
        for number, window in enumerate(windows):
            of_group = {id(group): each for group, each in zip(optimizer.param_groups, window, strict=True)}
            for group, name, everything in lists:
                indices = of_group[id(group)]
                group[name][:] = everything[indices.start : indices.stop]
            step(number, optimizer.step)
    finally:
        for group, name, everything in lists:
            group[name][:] = everything
