"""What this rank holds of every parameter and buffer along tp, and the moves between its parts and whole
tensors.

        whole [4, 6]                     part of rank 0    part of rank 1
take    a a a b b b                          a a a            b b b
        a a a b b b     -------------->      a a a            b b b      gather: all parts to every rank,
        ...             <--------------      ...              ...        one tensor at a time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from meshloom.checkpoint.tensor_file import Stream, TensorEntry, widest_first
from meshloom.comm import pieces as moves
from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces
from meshloom.comm.steps import Steps
from meshloom.parameters.model import replace_tensors


class Shards:
    """The parts of one rank of a tensor-parallel group.

    pieces: who holds what of a parameter or buffer, by name; what is not named is whole on every rank. group:
    the ranks; None: there is one. Tied tensors are known under all their names once `divide` has seen them.
    """

    def __init__(self, pieces: Mapping[str, Pieces], group: Group | None) -> None:
        self.group = group
        self.rank = group.rank if group else 0
        self.size = group.size if group else 1
        for name, each in pieces.items():
            assert each.num_ranks == self.size, (
                f"{name} is divided over {each.num_ranks} ranks, and the group has {self.size}"
            )
        self.pieces = {name: each for name, each in pieces.items() if not each.is_whole}
        self._first: dict[str, str] = {}  # of every name of a tied tensor, the first

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has the whole shape of `name`: contiguous memory of its own, or
        `whole` itself if it is not divided."""
        if name not in self.pieces:
            return whole
        part = moves.take(self.pieces[name], self.rank, whole)
        return part.clone(memory_format=torch.contiguous_format)

    def gather(self, name: str, part: Tensor) -> Steps[Tensor]:
        """The whole tensor of all ranks' parts, on every rank. What several hold is the first holder's.

        part: of the local shape of `name`, any dtype; every rank of the group calls it. An undivided tensor
            comes back as it is.
        """
        if name not in self.pieces:
            return part
        pieces = self.pieces[name]
        longest = self._longest(name)  # an all_gather takes the same size from all
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part.reshape(-1)
        everyone = part.new_empty(self.size * longest)
        assert self.group is not None
        work = self.group.all_gather(everyone, padded)
        yield
        work.wait()
        rows = everyone.view(self.size, longest)
        parts = [
            row[: pieces.num_elements(rank)].view(pieces.local_shape(rank)) for rank, row in enumerate(rows)
        ]
        return moves.assemble(pieces, parts)

    def gather_bytes(self, name: str, dtype: torch.dtype) -> int:
        """Bytes that `gather` hands to all_gather."""
        return self._longest(name) * dtype.itemsize if name in self.pieces else 0

    def whole_shape(self, name: str, part: Tensor) -> tuple[int, ...]:
        """Shape of the whole tensor of which `part` is this rank's."""
        return self.pieces[name].shape if name in self.pieces else tuple(part.shape)

    def fingerprint(self, model: nn.Module) -> dict[str, str]:
        """Whole shape and dtype, as text, of everything that a checkpoint of `model` holds, by the names of
        `state_dict`."""
        return {
            name: f"{list(self.whole_shape(name, tensor))} {tensor.dtype}"
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, Tensor)
        }

    def speaks_for(self, name: str) -> Tensor | bool:
        """Which elements of its part this rank counts, so that each element of the whole is counted by one
        rank: the first that holds it.

        All or none where it is so; else bool [elements of the part, flat], on the CPU.
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
        """Put this rank's part in the place of every divided parameter and buffer of `model`, under all names
        that it has there.

        A part is a new parameter of the local shape with memory of its own, so the whole one is freed when
        nobody else holds it.
        """

        def part_of(names: list[str], whole: Tensor) -> Tensor | None:
            known = next((name for name in names if name in self.pieces), None)
            if known is None:
                return None
            assert tuple(whole.shape) == self.pieces[known].shape, (
                f"{known} is {tuple(whole.shape)}, its pieces are of {self.pieces[known].shape}"
            )
            self.pieces.update(dict.fromkeys(names, self.pieces[known]))
            self._first.update(dict.fromkeys(names, names[0]))
            return self.take(known, whole.detach())

        replace_tensors(model, part_of)

    def weights(self, model: nn.Module) -> Stream:
        """The `state_dict` of a divided model in whole shapes, without what is only a shape here; on the
        group's first rank.

        Divided tensors are gathered one by one, tied ones once.
        """
        state = {
            name: each
            for name, each in model.state_dict().items()
            if not (isinstance(each, Tensor) and each.is_meta)
        }
        firsts = list(dict.fromkeys(self._first.get(name, name) for name in state))
        together = sorted(state, key=lambda name: firsts.index(self._first.get(name, name)))
        entries = widest_first(
            [
                TensorEntry(
                    name, self.whole_shape(name, state[name]), TensorEntry.of(name, state[name]).dtype
                )
                for name in together
            ]
        )

        def run(take: Callable[[str, Tensor], None]) -> Steps[None]:
            newest, whole = "", torch.empty(0)
            for each in entries:
                if newest != (newest := self._first.get(each.name, each.name)):
                    del whole
                    whole = yield from self.gather(each.name, state[each.name])
                if self.rank == 0:
                    take(each.name, whole)

        return Stream(entries=entries if self.rank == 0 else [], run=run)

    def weights_bytes(self, model: nn.Module) -> int:
        """Bytes that `weights` hands to all_gather."""
        divided = {
            self._first.get(name, name): tensor.dtype
            for name, tensor in model.state_dict().items()
            if name in self.pieces and not tensor.is_meta
        }
        return sum(self.gather_bytes(name, dtype) for name, dtype in divided.items())

    def weights_loader(self, model: nn.Module) -> Callable[[str, Tensor], None]:
        """What copies this rank's part of a whole tensor, by its name in `state_dict`, into a divided
        model."""
        state = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}

        def take(name: str, whole: Tensor) -> None:
            with torch.no_grad():
                if name in state and not state[name].is_meta:
                    state[name].copy_(self.take(name, whole))

        return take

    def _longest(self, name: str) -> int:
        return max(self.pieces[name].num_elements(rank) for rank in range(self.size))
