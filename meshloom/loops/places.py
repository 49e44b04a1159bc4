"""Attributes of a module and of those within it that are not torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import nn

from meshloom.program.capture.guarded_values import MISSING
from meshloom.program.trace.attributes import TORCHS_OWN

Place = tuple[str, str]  # names of a module and of its attribute


def attributes(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            cached = isinstance(inspect.getattr_static(type(module), name, None), cached_property)
            if name not in TORCHS_OWN and name != "training" and not cached:
                yield (path, name), value


def where(model: nn.Module, place: Place) -> str:
    return f"{type(model.get_submodule(place[0])).__name__}.{place[1]}"


def get_at(model: nn.Module, place: Place) -> Any:
    return vars(model.get_submodule(place[0])).get(place[1], MISSING)


def set_at(model: nn.Module, place: Place, value: Any) -> None:
    there = vars(model.get_submodule(place[0]))
    if value is MISSING:
        there.pop(place[1], None)
    else:
        there[place[1]] = value
