"""A model of the matrix: what builds it, its loss, its samples, and what settings need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.buffer_rules import BufferRule
from tests.jobs import Samples


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model family in its smallest form.

    features: what it is in the matrix for. samples: of a number of them, builds the data. chunk: samples of a full
    microbatch of one replica, equal to a size of the model in some models. stages: most that it is cut into, two where no block begins one by itself.
    cut: the module that begins the second of two stages; "": it has none that could. pins: a value of `tp_placements`;
    "": none. norms: whether batch statistics may be synchronised. several: whether a chunk of one sample cannot be computed,
    as vectors of one sample have no statistics. sparse: whether
    gradients of tables are sparse. computed: whether a buffer begins with what the values of a parameter come to.
    leaves, buffers: of its job. interacts: whether a whole batch has another
    result than its parts, as samples interact or the loss draws.
    """

    name: str
    features: str
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    samples: Callable[[int], Samples]
    chunk: int = 3
    stages: int = 4
    cut: str = ""
    pins: str = ""
    norms: bool = False
    several: bool = False
    sparse: bool = False
    computed: bool = False
    leaves: tuple[str, ...] = ()
    buffers: Mapping[str, BufferRule] = field(default_factory=dict[str, BufferRule])
    interacts: bool = False


def drawn(seed: int) -> torch.Generator:
    """A generator of its own for each model's samples."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal [*shape]."""
    return torch.randn(shape, generator=drawn(seed))


def whole(seed: int, below: int, *shape: int) -> Tensor:
    """Uniform whole numbers from 0 to `below` - 1, [*shape]."""
    return torch.randint(below, shape, generator=drawn(seed))
