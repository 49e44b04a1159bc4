"""Passes of a script over data loaders without a `backward()`: what they evaluated, and what they added up."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshloom.adopt.watching.draws import Draws, draws_now


@dataclass(frozen=True)
class SeenFrame:
    """A function of the user's, or a file, on the way from the script to where something was seen. function: "<module>" of a
    file. line: where it was. values: of its names. owner: the object whose method it is, unless that is a module; attributes: the
    owner's then. made: of functions that have returned an optimizer with something else, or made an owner, their names."""

    path: Path
    function: str
    line: int
    values: dict[str, Any]
    globals: dict[str, Any]
    owner: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    made: Mapping[types.CodeType, dict[str, Any]] = field(
        default_factory=dict[types.CodeType, dict[str, Any]]
    )
    _added: set[str] = field(default_factory=set[str], init=False)

    def add(self, values: Mapping[str, Any]) -> None:
        """Values by names that an object taken apart gives its attributes; what has such a name already keeps it."""
        new = {name: each for name, each in values.items() if name not in self.values}
        self.values.update(new)
        self._added.update(new)

    def forget_added(self) -> None:
        """What was added: the names are found anew."""
        for name in self._added:
            self.values.pop(name, None)
        self._added.clear()


@dataclass(frozen=True, kw_only=True)
class SeenPass:
    """A pass over `loader` that came to its end and trained nothing.

    frames: at its end, outermost first. totals: by name in the innermost, what was added up: (number, 1), (sum of a list, its
    length), (average of a meter, 1). module: the first with parameters that was called without gradients; state: its values
    then. samples: of the last batch, as the loader gave them to its `collate`. draws: states of generators at the first batch.
    steps: optimizer steps before the pass.
    """

    frames: list[SeenFrame]
    totals: dict[str, tuple[float, int]]
    loader: Any
    module: nn.Module
    state: dict[str, Tensor]
    samples: list[Any]
    draws: Draws
    steps: int


@dataclass
class _Open:
    loader: Any
    samples: list[Any] = field(default_factory=list[Any])
    module: nn.Module | None = None
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    trains: bool = False
    draws: Draws | None = None


class Passes:
    """The passes that are going on, the innermost last. frames: the user's, at the call of a frame."""

    def __init__(self, frames: Callable[[Any], list[SeenFrame]]) -> None:
        self._frames = frames
        self._open: list[_Open] = []
        self.ended: list[SeenPass] = []

    def began(self, loader: Any) -> None:
        """An iterator of the loader was made."""
        self._open = [each for each in self._open if each.loader is not loader]
        self._open.append(_Open(loader))

    def gave(self, loader: Any, samples: list[Any]) -> None:
        """A batch was read: passes within it have been left."""
        self._leave_to(loader)
        if self._open:
            self._open[-1].samples = samples
            self._open[-1].draws = self._open[-1].draws or draws_now()

    def called(self, module: nn.Module) -> None:
        """A module was called."""
        if not self._open or torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return
        newest = self._open[-1]
        if newest.module is None and not newest.trains and newest.samples:
            newest.module, newest.state = module, values_of(module)

    def trained(self) -> None:
        """`backward()` was called."""
        if self._open:
            self._open[-1] = _Open(self._open[-1].loader, trains=True)

    def came_to_end(self, loader: Any, caller: Any, steps: int) -> None:
        """The loader has no further batch. caller: the frame that asked."""
        self._leave_to(loader)
        if not self._open:
            return
        left = self._open.pop()
        if left.module is not None and not left.trains and (frames := self._frames(caller)):
            self.ended.append(
                SeenPass(
                    frames=frames, totals=totals_of(frames[-1].values), loader=loader, module=left.module, state=left.state,
                    samples=left.samples, draws=left.draws or draws_now(), steps=steps,
                )
            )  # fmt: skip

    def _leave_to(self, loader: Any) -> None:
        places = [place for place, each in enumerate(self._open) if each.loader is loader]
        self._open = self._open[: places[-1] + 1] if places else []


def totals_of(values: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """As `SeenPass.totals`."""
    found: dict[str, tuple[float, int]] = {}
    for name, value in values.items():
        if isinstance(value, list) and value and None not in (numbers := [_number(each) for each in value]):
            found[name] = sum(each for each in numbers if each is not None), len(value)
        elif (number := _number(getattr(value, "avg", value))) is not None:
            found[name] = number, 1
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor | numpy.generic | numpy.ndarray) and getattr(value, "size", None) is not None:
        single = value.numel() == 1 if isinstance(value, Tensor) else value.size == 1
        return float(value.item()) if single else None
    return float(value) if isinstance(value, int | float) else None


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters and buffers, by name."""
    return {name: on_host(each) for name, each in model.state_dict().items() if isinstance(each, Tensor)}


def on_host(tensor: Tensor) -> Tensor:
    """A copy without gradient on the CPU, where scripts are compared with jobs."""
    return tensor.detach().to("cpu", copy=True)
