"""Parts of several tensors in one message: gathered whole, and gradients of the whole reduced to parts.

    rank 0   a[0:3] b[0:2]      all-gather     a[0:5] b[0:3]     on every rank
    rank 1   a[3:5] b[2:3] .    ---------->

A message to gather ends with a word of whose parts it has: ranks that call different modules of one size would mix them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.loops.part_place import PartError, PartPlace

_WORD = 3


def gathered(parts: Sequence[Tensor], places: Sequence[PartPlace]) -> list[Tensor]:
    """The whole of each, on every rank of their group, without its graph. parts: plain tensors, of this rank."""
    wholes: list[Tensor] = [*parts]
    for indices in _by_dtype(parts):
        group, sizes = places[indices[0]].group, _sizes([places[i] for i in indices])
        longest = max(sum(each) for each in sizes)
        own = parts[indices[0]].new_zeros(longest + _WORD)
        received = own.new_empty(group.size * own.numel())
        torch.cat([parts[i].detach().reshape(-1) for i in indices], out=own[: sum(sizes[group.rank])])
        own[longest:] = own.new_tensor(_word([places[i].name for i in indices]))
        group.all_gather(received, own).wait()
        if not torch.equal(received.view(group.size, -1)[:, longest:], own[longest:].expand(group.size, -1)):
            raise PartError(
                f"This rank gathers {places[indices[0]].name}, and another one something else: ranks call the same modules, "
                "in the same order. Call it on every rank, and count its result zero times where it is not wanted."
            )
        flats = received.split(own.numel())
        pieces = [flat[: sum(each)].split(list(each)) for flat, each in zip(flats, sizes, strict=True)]
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


def _word(names: Sequence[str]) -> list[int]:
    """A few numbers, which every dtype holds, that tell these names from others."""
    code = zlib.crc32("\n".join(names).encode())
    return [code // 127**digit % 127 for digit in range(_WORD)]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    dtypes = dict.fromkeys(each.dtype for each in tensors)
    return [[i for i, each in enumerate(tensors) if each.dtype == dtype] for dtype in dtypes]


def _sizes(places: Sequence[PartPlace]) -> list[list[int]]:
    """Elements of each of them that each rank has."""
    return [[each.shape_of(rank).numel() for each in places] for rank in range(places[0].group.size)]
