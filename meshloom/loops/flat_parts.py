"""Parts of several tensors in one message: gathered whole, and gradients of the whole reduced to parts.

rank 0   a[0:3] b[0:2]      all-gather     a[0:5] b[0:3]     on every rank
rank 1   a[3:5] b[2:3] .    ---------->
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.loops.part_place import PartPlace


def gathered(parts: Sequence[Tensor], places: Sequence[PartPlace]) -> list[Tensor]:
    """The whole of each, on every rank of their group, without its graph. parts: plain tensors, of this rank."""
    wholes: list[Tensor] = [*parts]
    for indices in _by_dtype(parts):
        group, sizes = places[indices[0]].group, _sizes([places[i] for i in indices])
        longest = max(sum(each) for each in sizes)
        first = parts[indices[0]]
        own, received = first.new_zeros(longest), first.new_empty(group.size * longest)
        torch.cat([parts[i].detach().reshape(-1) for i in indices], out=own[: sum(sizes[group.rank])])
        group.all_gather(received, own).wait()
        pieces = (
            [
                flat[: sum(each)].split(list(each))
                for flat, each in zip(received.split(longest), sizes, strict=True)
            ]
            if longest
            else [[received] * len(indices)] * group.size
        )
        for number, i in enumerate(indices):
            place = places[i]
            wholes[i] = torch.cat(
                [pieces[rank][number].view(place.shape_of(rank)) for rank in range(group.size)], place.dim
            )
    return wholes


def reduced_to_parts(
    wholes: Sequence[Tensor | None], parts: Sequence[Tensor], places: Sequence[PartPlace], weight: float
) -> list[Tensor | None]:
    """This rank's part of the mean over ranks of each of `wholes`, every rank's times its `weight`. None: this rank has none, which
    counts as zeros where another has one. parts: of their dtypes."""
    reduced: list[Tensor | None] = [None] * len(parts)
    for indices in _by_dtype(parts):
        group, sizes = places[indices[0]].group, _sizes([places[i] for i in indices])
        longest = max(sum(each) for each in sizes)
        # behind the values: who has some
        sent = parts[indices[0]].new_zeros(group.size, longest + len(indices))
        for number, i in enumerate(indices):
            whole = wholes[i]
            if whole is None:
                continue
            whole = whole.to_dense() if whole.is_sparse else whole
            for rank, flat in enumerate(sent):
                begin = sum(sizes[rank][:number])
                part = places[i].part_of(whole, rank)
                torch.mul(part, weight, out=flat[begin : begin + part.numel()].view(part.shape))
            sent[:, longest + number] = 1
        own = sent.new_empty(sent.shape[1])
        group.reduce_scatter(own, sent.view(-1), "avg").wait()
        any_has = own[longest:].tolist() if any(wholes[i] is None for i in indices) else [1] * len(indices)
        split = own[: sum(sizes[group.rank])].split(list(sizes[group.rank]))
        for i, each, has in zip(indices, split, any_has, strict=True):
            reduced[i] = each.view(places[i].shape_of(group.rank)).clone() if has else None
    return reduced


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    dtypes = dict.fromkeys(each.dtype for each in tensors)
    return [[i for i, each in enumerate(tensors) if each.dtype == dtype] for dtype in dtypes]


def _sizes(places: Sequence[PartPlace]) -> list[list[int]]:
    """Elements of each of them that each rank has."""
    return [[each.shape_of(rank).numel() for each in places] for rank in range(places[0].group.size)]
