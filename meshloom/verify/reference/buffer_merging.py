"""Numbers in attributes of the reference's modules."""

from __future__ import annotations

from torch import nn

Numbers = dict[tuple[str, str], float]  # (module, attribute)


def plain_numbers(model: nn.Module) -> Numbers:
    """Numbers in attributes of modules, which chunks of a step all find as they were before it."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def changed_numbers(model: nn.Module, before: Numbers) -> Numbers:
    """Those that differ from `before`, of the same attributes."""
    now = plain_numbers(model)
    return {place: now[place] for place, was in before.items() if place in now and now[place] != was}


def put_numbers(model: nn.Module, numbers: Numbers) -> None:
    """Set these attributes."""
    for (path, name), value in numbers.items():
        vars(model.get_submodule(path))[name] = value
