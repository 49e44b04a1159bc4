"""The values that modules give their own parameters, each module by itself: by its `reset_parameters`, then by the
`_init_weights` of the nearest module around it that has one.

    blocks.3.up        nn.Linear   its reset_parameters, then the model's _init_weights(blocks.3.up)
    blocks.3.up.weight             neither: it has no convention
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.random import preserved_draws, seed_everything

_OWN = ("reset_parameters", "_reset_parameters")  # the latter of nn.MultiheadAttention
_OF_OTHERS = "_init_weights"


def values_by_convention(model: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """The values of the parameters that the module at `path` itself has, by their names there; NaN where no convention
    gives them any.

    model: with parameters on the meta device, where what a convention does to those of other modules is lost.

    >>> from meshloom.parameters.values.building import described
    >>> model = described(lambda: nn.Sequential(nn.LayerNorm(2)))
    >>> values_by_convention(model, "0", seed=1)
    {'weight': tensor([1., 1.]), 'bias': tensor([0., 0.])}
    """
    module = model.get_submodule(path)
    own: dict[str, nn.Parameter | None] = vars(module).get(
        "_parameters", {}
    )  # none are those of a scripted one
    before = {name: each for name, each in own.items() if each is not None and _has_none(each)}
    real = {
        name: nn.Parameter(torch.full_like(each, torch.nan, device="cpu"), requires_grad=each.requires_grad)
        for name, each in before.items()
    }
    own.update(real)
    try:
        with preserved_draws(), torch.no_grad():
            seed_everything(seed)
            for convention in _conventions(model, path):
                convention()
    finally:
        own.update(before)
    return {name: each.detach() for name, each in real.items()}


def _conventions(model: nn.Module, path: str) -> Iterator[Callable[[], Any]]:
    module: Any = model.get_submodule(path)
    for name in _OWN:
        if callable(own := getattr(module, name, None)):
            yield own
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):
        around: Any = model.get_submodule(".".join(names[:depth]))
        if callable(given := getattr(around, _OF_OTHERS, None)):
            if inspect.signature(given).parameters:
                yield lambda: given(module)
            elif around is module:
                yield given
            else:
                continue
            return


def _has_none(parameter: Tensor) -> bool:
    """Whether it is without values, and such that NaN shows that it still has none."""
    return parameter.is_meta and (parameter.is_floating_point() or parameter.is_complex())
