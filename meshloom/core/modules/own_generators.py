"""Generators that modules hold and draw with themselves: `torch.randn(..., generator=self.generator)`.

Each is seeded anew for every chunk, as torch's own is, so that all plans draw what one device draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

import torch
from torch import nn

from meshloom.core.random import derive

OwnGenerator = tuple[str, torch.Generator]  # module and attribute


def own_generators(model: nn.Module) -> list[OwnGenerator]:
    """Those that code of the model's classes reads, but for constructors."""
    return [
        (f"{path}.{name}", vars(module)[name])
        for path, module in model.named_modules()
        for name in _read(module)
    ]


def seed_own_generators(found: list[OwnGenerator], seed: int) -> None:
    """Each by its name. seed: of the chunk."""
    for name, generator in found:
        generator.manual_seed(derive(seed, name))


def drawing_modules(model: nn.Module) -> dict[str, str]:
    """The modules that draw with such generators -> with which, for people; a program has torch's own alone."""
    reading = ((path, list(_read(module))) for path, module in model.named_modules())
    return {path: f"it draws with a generator of its own, {names[0]}" for path, names in reading if names}


def _read(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if isinstance(value, torch.Generator) and any(
            name in each.__code__.co_names for each in _methods(module)
        ):
            yield name


def _methods(module: nn.Module) -> Iterator[FunctionType]:
    for kind in type(module).__mro__:
        for name, each in vars(kind).items():
            if (
                isinstance(each, FunctionType)
                and name != "__init__"
                and not kind.__module__.startswith("torch.")
            ):
                yield each
