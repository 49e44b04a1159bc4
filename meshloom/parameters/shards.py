"""The shards along tp of parameters and buffers, and how they are made of full tensors and gathered.

        full [4, 6]                      shard of rank 0   shard of rank 1
take    a a a b b b                          a a a            b b b
        a a a b b b     -------------->      a a a            b b b      gather: all shards to every rank,
        ...             <--------------      ...              ...        one tensor at a time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm import pieces as moves
from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces
from meshloom.parameters.model import replace_tensors


class Shards:
    """The shards that one rank of a tensor-parallel group holds.

    pieces: which rank holds what of a parameter or buffer, by name; those not named are replicated. group:
    the ranks; None: there is one. Tied tensors are known under all their names after `divide`.
    """

    def __init__(self, pieces: Mapping[str, Pieces], group: Group | None) -> None:
        self.group = group
        self.rank = group.rank if group else 0
        self.size = group.size if group else 1
        for name, each in pieces.items():
            assert each.num_ranks == self.size, (
                f"{name} is sharded over {each.num_ranks} ranks, and the group has {self.size}"
            )
        self.pieces = {name: each for name, each in pieces.items() if not each.is_whole}

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor that has the full shape of `name`, contiguous in memory of its own;
        `whole` itself if `name` is replicated."""
        if name not in self.pieces:
            return whole
        part = moves.take(self.pieces[name], self.rank, whole)
        return part.clone(memory_format=torch.contiguous_format)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """The full tensor of all ranks' shards, on every rank. Elements that several ranks hold are those of
        the first of them.

        part: of the local shape of `name`, any dtype; every rank of the group calls it. A replicated tensor
        is returned unchanged.
        """
        if name not in self.pieces:
            return part
        pieces = self.pieces[name]
        longest = self._longest(name)  # all_gather needs the same size on all ranks
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part.reshape(-1)
        everyone = part.new_empty(self.size * longest)
        assert self.group is not None
        self.group.all_gather(everyone, padded).wait()
        rows = everyone.view(self.size, longest)
        parts = [
            row[: pieces.num_elements(rank)].view(pieces.local_shape(rank)) for rank, row in enumerate(rows)
        ]
        return moves.assemble(pieces, parts)

    def gather_bytes(self, name: str, dtype: torch.dtype) -> int:
        """Bytes that `gather` hands to all_gather."""
        return self._longest(name) * dtype.itemsize if name in self.pieces else 0

    def whole_shape(self, name: str, part: Tensor) -> tuple[int, ...]:
        """The full shape of the tensor of which this rank holds `part`."""
        return self.pieces[name].shape if name in self.pieces else tuple(part.shape)

    def fingerprint(self, model: nn.Module) -> dict[str, str]:
        """Full shape and dtype, as text, of every tensor that a checkpoint of `model` holds, by the names of
        `state_dict`."""
        return {
            name: f"{list(self.whole_shape(name, tensor))} {tensor.dtype}"
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, Tensor)
        }

    def speaks_for(self, name: str) -> Tensor | bool:
        """The elements of its shard that this rank counts, so that each element of the full tensor is counted
        by one rank, the first that holds it.

        True or False for all or none; else bool [elements of the shard, flat], on the CPU.
        """
        if name not in self.pieces:
            return self.rank == 0
        pieces = self.pieces[name]
        if not pieces.is_shared:
            return True
        earlier = torch.zeros(pieces.shape, dtype=torch.bool)
        for rank in range(self.rank):
            moves.put(pieces, rank, torch.ones(pieces.local_shape(rank), dtype=torch.bool), earlier)
        mine = ~moves.take(pieces, self.rank, earlier).reshape(-1)
        return mine if bool(mine.any()) and not bool(mine.all()) else bool(mine.any())

    def divide(self, model: nn.Module) -> None:
        """Replaces every sharded parameter and buffer of `model` by this rank's shard, under all names that
        it has there.

        A shard is a new parameter of the local shape in memory of its own, so that the full tensor is freed
        when nothing else refers to it.
        """

        def part_of(names: list[str], whole: Tensor) -> Tensor | None:
            return None if self.pieces_of(names, whole) is None else self.take(names[0], whole.detach())

        replace_tensors(model, part_of)

    def pieces_of(self, names: Sequence[str], whole: Tensor) -> Pieces | None:
        """Which rank holds what of a tensor of the full shape, which is known under all its names from now
        on; None: it is replicated."""
        known = next((name for name in names if name in self.pieces), None)
        if known is None:
            return None
        assert tuple(whole.shape) == self.pieces[known].shape, (
            f"{known} is {tuple(whole.shape)}, its pieces are of {self.pieces[known].shape}"
        )
        self.pieces.update(dict.fromkeys(names, self.pieces[known]))
        return self.pieces[known]

    def weights_loader(self, model: nn.Module) -> Callable[[str, Tensor], None]:
        """Returns the function that copies this rank's shard of a full tensor, by its name in `state_dict`,
        into a sharded model."""
        state = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}

        def take(name: str, whole: Tensor) -> None:
            with torch.no_grad():
                if name in state and not state[name].is_meta:
                    state[name].copy_(self.take(name, whole))

        return take

    def _longest(self, name: str) -> int:
        return max(self.pieces[name].num_elements(rank) for rank in range(self.size))
