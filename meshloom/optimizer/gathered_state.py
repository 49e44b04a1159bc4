"""State of sharded parameters, gathered for a checkpoint one tensor at a time: each rank writes a contiguous
piece of every full tensor.

    shards over tp, slices over dp     full on every rank, one tensor at a time       pieces, one per rank
    [ a a ] [ b b ]                    [ a a b b ]                                    [ a ] [ a ] [ b ] [ b ]
    [ a a ] [ b b ]                    [ a a b b ]

So a checkpoint looks the same under every plan, and saving takes no more memory than its largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.checkpoint.format import Piece
from meshloom.checkpoint.tensor_file import Stream, TensorEntry
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.optimizer.state_pieces import StateShard
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import Traffic
from meshloom.tensor_parallel.layout.placement import even_parts


@dataclass(frozen=True, kw_only=True)
class GatheredState:
    """What a rank saves of the full tensors: pieces without elements, the stream that their elements come
    from, and the bytes that gathering takes."""

    pieces: list[Piece]
    stream: Stream
    traffic: Traffic


def gathered_pieces(
    parts: Sequence[StateShard],
    shards: Shards,
    owners: Group | None,
    world: Group,
    device: torch.device,
    here: Collection[str] | None = None,
) -> GatheredState:
    """This rank's pieces of the full state tensors of all ranks' `parts`, agreed on but not gathered yet.
    Every rank calls it.

    owners: the ranks along dp among which the shards are sliced; None: they are not. world: all ranks, which
    first agree on what there is: a rank that holds nothing of a parameter does not know its state. device:
    of the groups' tensors. here: names of this rank's parameters, if other ranks along pp have others.
    """
    everyone = collect(
        world, [[each.key, each.held.name, str(each.tensor.dtype).removeprefix("torch.")] for each in parts]
    )
    known: dict[str, tuple[str, torch.dtype]] = {
        key: (name, getattr(torch, dtype))
        for rank in everyone
        for key, name, dtype in rank
        if here is None or name in here
    }
    known = dict(sorted(known.items(), key=lambda item: -item[1][1].itemsize))  # as they will lie in files
    mine = {each.key: each for each in parts}
    assert len(mine) == len(parts), "a rank owns one slice of a parameter"
    spans: list[list[list[int]]] = []  # [owner][tensor]
    if owners is not None and known:
        spans = _spans(owners, [mine.get(key) for key in known], device)
    share = shards.rank if owners is None else owners.rank * shards.size + shards.rank
    pieces: dict[str, Piece] = {}
    for key, (name, dtype) in known.items():
        shape = shards.pieces[name].shape
        start, stop = even_parts(math.prod(shape), shards.size * (owners.size if owners else 1))[share]
        if start < stop:
            pieces[key] = Piece(
                key, torch.empty(stop - start, dtype=dtype, device="meta"), start, stop, shape
            )

    def run(take: Callable[[str, Tensor], None]) -> None:
        for number, (key, (name, dtype)) in enumerate(known.items()):
            divided = shards.pieces[name]
            flat = mine[key].tensor.to(device) if key in mine else torch.empty(0, dtype=dtype, device=device)
            if owners is not None:
                flat = _joined(
                    owners, flat, [rank[number] for rank in spans], divided.num_elements(shards.rank)
                )
            whole = shards.gather(name, flat.view(divided.local_shape(shards.rank)))
            if piece := pieces.get(key):
                take(piece.name, whole.reshape(-1)[piece.start : piece.stop])

    slices = (
        [(dtype, [rank[number] for rank in spans]) for number, (_, dtype) in enumerate(known.values())]
        if spans
        else []
    )
    return GatheredState(
        pieces=list(pieces.values()),
        stream=Stream(entries=[TensorEntry.of(each.name, each.tensor) for each in pieces.values()], run=run),
        traffic=Traffic.along(
            "dp", all_gather=sum(16 + _longest(each) * dtype.itemsize for dtype, each in slices)
        )
        + Traffic.along(
            "tp", all_gather=sum(shards.gather_bytes(name, dtype) for name, dtype in known.values())
        ),
    )


def _spans(owners: Group, mine: Sequence[StateShard | None], device: torch.device) -> list[list[list[int]]]:
    """Start and stop of what each owner has of each tensor: [owner][tensor]."""
    here = torch.tensor(
        [[each.held.start, each.held.stop] if each else [0, 0] for each in mine],
        dtype=torch.int64,
        device=device,
    )
    everyone = here.new_empty(owners.size * here.numel())
    owners.all_gather(everyone, here.view(-1)).wait()
    return everyone.view(owners.size, len(mine), 2).tolist()


def _joined(owners: Group, flat: Tensor, spans: Sequence[Sequence[int]], num_elements: int) -> Tensor:
    """A rank's shard [num_elements], joined from the slices of its owners."""
    longest = _longest(spans)  # all_gather needs the same size on all ranks
    padded = flat.new_zeros(longest)
    padded[: flat.numel()] = flat
    everyone = flat.new_empty(owners.size * longest)
    if longest:
        owners.all_gather(everyone, padded).wait()
    joined = flat.new_zeros(num_elements)
    for row, (start, stop) in zip(everyone.view(owners.size, longest), spans, strict=True):
        joined[start:stop] = row[: stop - start]
    return joined


def _longest(spans: Sequence[Sequence[int]]) -> int:
    return max(stop - start for start, stop in spans)
