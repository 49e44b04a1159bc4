"""Random draws of a program, numbered in eager order, each seeded from the one before (`KeyedDraws`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.core.random import derive, pass_over_draws
from meshloom.program.ir.nodes import Node


def seed_of_draw(chunk_seed: int, number: int) -> int:
    """The generator's seed for draw `number` of a chunk (counted from 0).

    >>> seed_of_draw(7, 0), seed_of_draw(7, 2) == derive(derive(7, "next"), "next")
    (7, True)
    """
    for _ in range(number):
        chunk_seed = derive(chunk_seed, "next")
    return chunk_seed


def passing_over_draws(node: Node, count: int) -> Node:
    """A node, to be run before `node`, that advances the random state past `count` draws of others."""
    name = f"{node.name}__skip"
    return replace(
        node, name=name, target=pass_over_draws, args=(count,), kwargs={}, num_draws=0, draw=None, outputs=()
    )


class CountDraws(TorchDispatchMode):
    """Counts the random ATen calls that `KeyedDraws` would seed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.count += 1
        return func(*args, **kwargs)
