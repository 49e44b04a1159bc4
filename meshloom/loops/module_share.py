"""What one rank of a replica holds of a module: its shards of what is divided over tp, of its stages along pp; the parameters stay the
same objects with less in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces
from meshloom.parameters.model import all_named, make_row_major
from meshloom.parameters.shards import Shards


class ModuleShare:
    """Of `module`, whole at first. tp, pp: the ranks along these axes."""

    def __init__(self, module: nn.Module, tp: Group, pp: Group) -> None:
        self._module, self._pp = module, pp
        self._tensors: dict[str, Tensor] = {}  # parameters and buffers by their first names
        self._first: dict[str, str] = {}  # each name -> the first of the same tensor
        known: dict[Tensor, str] = {}
        for name, each in all_named(module):
            self._first[name] = known.setdefault(each, name)
            self._tensors.setdefault(self._first[name], each)
        self._shapes = {name: each.shape for name, each in self._tensors.items()}
        self._holders: Mapping[str, tuple[int, ...]] = {}
        self.shards = Shards({}, tp)
        self.is_whole = True

    def keep(self, pieces: Mapping[str, Pieces], holders: Mapping[str, tuple[int, ...]]) -> None:
        """From now on this rank has its share only. pieces: by name, which rank along tp holds what. holders: by name, the ranks along pp that hold
        it, the owner first; {}: there is one."""
        make_row_major(self._module)
        self._holders, self.shards, self.is_whole = holders, Shards(pieces, self.shards.group), False
        for name, each in self._tensors.items():
            self._take(name, each)

    def holds(self, name: str) -> bool:
        """Whether this rank has something of it."""
        return not self._holders or self._pp.rank in self._holders[self._first[name]]

    @property
    def lent(self) -> list[str]:
        """Names of what several ranks along pp hold."""
        return [name for name, ranks in self._holders.items() if len(ranks) > 1]

    @contextmanager
    def whole(self, *, gradients: bool) -> Iterator[None]:
        """A context in which all is whole on every rank; what is written to it is kept."""
        parted = [
            (name, each)
            for name, each in self._tensors.items()
            if self._holders or name in self.shards.pieces
        ]
        given = [each.grad for _, each in parted]
        has = torch.tensor([float(each is not None) for each in given])
        if gradients and self._holders and parted:
            has = has.to(parted[0][1].device)
            self._pp.all_reduce(has).wait()
        for (name, each), gradient, has_gradient in zip(parted, given, has.tolist(), strict=True):
            each.grad = None
            each.data = self._gathered(name, each.detach())
            if gradients and has_gradient:
                each.grad = self._gathered(name, each if gradient is None else gradient)
        try:
            yield
        finally:
            for (name, each), gradient in zip(parted, given, strict=True):
                self._take(name, each)
                if not gradients:
                    each.grad = gradient

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """As of `Execution`."""
        for name, each in self._module.state_dict().items():
            yield name, partial(self._gathered, name, each)

    def _take(self, name: str, tensor: Tensor) -> None:
        """Of a tensor that is whole, and of its gradient, this rank's share in the same object."""
        gradient, tensor.grad = tensor.grad, None
        tensor.data = self._share_of(name, tensor.detach())
        if gradient is not None and self.holds(name):
            tensor.grad = self._share_of(name, gradient)

    def _share_of(self, name: str, whole: Tensor) -> Tensor:
        return self.shards.take(name, whole) if self.holds(name) else whole.new_empty((0, *whole.shape[1:]))

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor on every rank of the replica, of what each has."""
        first = self._first.get(name, name)
        if first not in self._shapes:  # what a hook of `state_dict` has made
            return part
        whole = self.shards.gather(first, part) if self.holds(first) else part.new_empty(self._shapes[first])
        if self._holders:
            whole = whole.clone(memory_format=torch.contiguous_format)
            self._pp.broadcast(whole.view(-1), self._holders[first][0]).wait()
        return whole
