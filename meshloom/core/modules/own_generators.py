"""Generators that modules hold and draw with themselves: `torch.randn(..., generator=self.generator)`.

Each is seeded anew for every chunk, as torch's own is, so that all plans draw what one device draws.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meshloom.core.modules.class_code import names_read
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
    """The modules that draw with such generators -> the name of one; a program has torch's own alone."""
    reading = ((path, list(_read(module))) for path, module in model.named_modules())
    return {path: names[0] for path, names in reading if names}


def _read(module: nn.Module) -> Iterator[str]:
    held = [name for name, value in vars(module).items() if isinstance(value, torch.Generator)]
    return (name for name in held if name in names_read(type(module)))
