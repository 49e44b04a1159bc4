"""Parts of tensors that ranks send each other, where some of them update whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work

K = TypeVar("K")


def send_parts(
    group: Group, dtypes: Sequence[torch.dtype], device: torch.device, going: Callable[[int, int, torch.dtype], Sequence[K]],
    length: Callable[[K, int, int], int], part: Callable[[K, int], Tensor],
) -> list[tuple[K, int, Tensor]]:  # fmt: skip
    """Send every rank flat parts, in one all_to_all per dtype; what arrives here, each with its sender, in order.

    going: what one rank sends another. length: the elements of what one rank sends another. part: what this rank sends one.
    """
    here, ranks = group.rank, range(group.size)
    works: list[Work] = []
    arriving: list[tuple[K, int, Tensor]] = []
    for dtype in dtypes:
        out = [going(here, to, dtype) for to in ranks]
        into = [going(source, here, dtype) for source in ranks]
        sizes = [sum(length(key, here, to) for key in keys) for to, keys in enumerate(out)]
        counts = [[length(key, source, here) for key in keys] for source, keys in enumerate(into)]
        expected = list(map(sum, counts))
        flat = torch.empty(sum(expected), dtype=dtype, device=device)
        sent = [part(key, to) for to, keys in enumerate(out) for key in keys]
        works.append(group.all_to_all(flat, torch.cat(sent) if sent else flat.new_empty(0), expected, sizes))
        pieces = iter(flat.split([each for of_rank in counts for each in of_rank]))
        arriving += [(key, source, next(pieces)) for source, keys in enumerate(into) for key in keys]
    for work in works:
        work.wait()
    return arriving


def flagged(values: Tensor | None, count: int, like: Tensor) -> Tensor:
    """So many values, flat, after a flag: 1 there, 0 not."""
    found = torch.zeros(count + 1, dtype=like.dtype, device=like.device)
    if values is not None:
        found[0] = 1
        found[1:] = values.reshape(-1)
    return found
