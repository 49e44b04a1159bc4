"""What one rank of a replica holds of a module: its shards of what is divided over tp, of its stages along pp; the parameters stay the
same objects with less in them. Under zero replicas divide each rank's share once more, by rows.

    whole -> share of a rank (tp, pp) -> rows of a replica (dp)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces
from meshloom.core.plan_shares import chunk_sizes
from meshloom.loops.gathering import Gatherer, Gathering
from meshloom.loops.made_parts import become, keep_states_in_parts, make_part
from meshloom.loops.part_place import PartError, PartPlace, TensorPlace, refusal_of
from meshloom.loops.part_tensor import AsPlain, plain, take_as_plain
from meshloom.parameters.model import all_named, make_row_major
from meshloom.parameters.shards import Shards


class ModuleShare:
    """Of `module`, whole at first. tp, pp: the ranks along these axes; among: all that have parts of a tensor. gatherer: of the replicas that divide
    shares; None: each has its own."""

    def __init__(
        self, module: nn.Module, tp: Group, pp: Group, among: Group, gatherer: Gatherer | None = None
    ) -> None:
        self._module, self._pp, self._among, self._gatherer = module, pp, among, gatherer
        self.replicas = gatherer.group if gatherer else None
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
        self._places: dict[str, SharePlace] = {}

    def keep(self, pieces: Mapping[str, Pieces], holders: Mapping[str, tuple[int, ...]]) -> None:
        """From now on this rank has its share only. pieces: by name, which rank along tp holds what. holders: by name, the ranks along pp that hold
        it, the owner first; {}: there is one."""
        make_row_major(self._module)
        take_as_plain()
        keep_states_in_parts()
        self._holders, self.shards, self.is_whole = holders, Shards(pieces, self.shards.group), False
        for name, each in self._parted():
            self._take(name, each)

    def holds(self, name: str) -> bool:
        """Whether this rank has something of it."""
        return not self._holders or self._pp.rank in self._holders[self._first[name]]

    def same(self, one: str, other: str) -> bool:
        """Whether ranks hold the same elements of two tensors."""
        one, other = self._first[one], self._first[other]
        return (
            self._shapes[one] == self._shapes[other]
            and self.shards.pieces.get(one) == self.shards.pieces.get(other)
            and self._holders.get(one) == self._holders.get(other)
        )

    def shares(self) -> Gathering | None:
        """What gathers this rank's share of each parameter, which replicas divide; None: they do not. What is kept needs no other rank."""
        if self._gatherer is None or self.is_whole:
            return None
        held = (
            each
            for name, each in self._tensors.items()
            if isinstance(each, nn.Parameter) and self.holds(name)
        )
        return Gathering(self._gatherer, [*held])

    @property
    def lent(self) -> list[str]:
        """Names of what several ranks along pp hold."""
        return [name for name, ranks in self._holders.items() if len(ranks) > 1]

    @contextmanager
    def whole(self, *, gradients: bool) -> Iterator[None]:
        """A context in which all is whole on every rank; what is written to it is kept. gradients: those too; without them nothing is written."""
        parted = self._parted()
        kinds: list[Any] = [type(each) for _, each in parted]
        parts = [plain(each.detach()) for _, each in parted]
        shares = None if gradients else self.shares()  # one replica may capture by itself
        known: dict[Tensor, Tensor] = (
            dict(zip(shares.parameters, shares.wholes(), strict=True)) if shares else {}
        )
        with AsPlain():
            given = [each.grad for _, each in parted]
            has = torch.tensor([float(each is not None) for each in given])
            if gradients and self._holders and parted:
                has = has.to(parted[0][1].device)
                self._pp.all_reduce(has).wait()
            for (name, each), part, gradient, has_gradient in zip(
                parted, parts, given, has.tolist(), strict=True
            ):
                each.grad = None
                whole = (
                    self.gathered(name, part) if gradients else self._of_share(name, known.get(each, part))
                )
                of_gradient = part if gradient is None else plain(gradient)
                gradient = self.gathered(name, of_gradient) if gradients and has_gradient else None
                if isinstance(each, nn.Parameter):
                    become(each, nn.Parameter, whole, changed=gradients)
                else:
                    each.data = whole
                each.grad = gradient
        try:
            yield
        finally:
            for (name, each), kind, part, gradient in zip(parted, kinds, parts, given, strict=True):
                if gradients:
                    self._take(name, each)
                elif isinstance(each, nn.Parameter):
                    become(each, kind, part, changed=False)
                    each.grad = gradient
                else:
                    each.data = part

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """As of `Execution`."""
        for name, each in self._module.state_dict(keep_vars=True).items():
            yield name, partial(self.gathered, name, plain(each.detach()))

    def counts(self, name: str) -> Tensor | bool:
        """The elements of this rank's share that it counts, so that each of the whole is counted once on the ranks of a replica."""
        first = self._first[name]
        if self._holders and self._pp.rank != self._holders[first][0]:
            return False
        return self.shards.speaks_for(first)

    def share_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's share of a tensor of the whole's shape."""
        return (
            self.shards.take(self._first[name], whole)
            if self.holds(name)
            else whole.new_empty((0, *whole.shape[1:]))
        )

    def _parted(self) -> list[tuple[str, Tensor]]:
        """The tensors that this rank may have a share of, by name. Buffers that other stages have stay here as they were."""
        divides = self.replicas and not self.is_whole
        return [
            (name, each)
            for name, each in self._tensors.items()
            if name in self.shards.pieces
            or (isinstance(each, nn.Parameter) and (self._holders or (divides and each.dim())))
        ]

    def _take(self, name: str, tensor: Tensor) -> None:
        """Of a tensor that is whole, and of its gradient, this rank's share in the same object."""
        if isinstance(tensor, nn.Parameter) and tensor.dim():
            if name not in self._places:
                self._places[name] = SharePlace(self, name, self._shapes[name], self._among)
            make_part(tensor, self._places[name])
            return
        tensor.data = self.share_of(name, tensor.detach())

    def gathered(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor on every rank of the replica, of what each has."""
        first = self._first.get(name, name)
        if first not in self._shapes:  # what a hook of `state_dict` has made
            return part
        rows = self._places[first].rows if first in self._places and self.holds(first) else None
        return self._of_share(first, rows.whole_of(part) if rows else part)

    def _of_share(self, first: str, part: Tensor) -> Tensor:
        """The same, of this rank's share."""
        whole = self.shards.gather(first, part) if self.holds(first) else part.new_empty(self._shapes[first])
        if self._holders:
            whole = whole.clone(memory_format=torch.contiguous_format)
            self._pp.broadcast(whole.view(-1), self._holders[first][0]).wait()
        return whole


class SharePlace(TensorPlace):
    """Of the parameter called `name` of a module of which a rank has `share`."""

    def __init__(self, share: ModuleShare, name: str, shape: torch.Size, group: Group) -> None:
        self._share, self.name, self.shape, self.group = share, name, shape, group
        self._counts, self._rows = share.counts(name), cast("PartPlace | None", None)
        if replicas := share.replicas:
            own = self.own_part(torch.empty(shape, device="meta")).shape
            sizes = tuple(chunk_sizes(own[0], replicas.size))
            self._rows = PartPlace(name=name, shape=own, dim=0, sizes=sizes, group=replicas)
            if isinstance(self._counts, Tensor):
                self._counts = self._rows.own_part(self._counts.view(own)).reshape(-1)

    @property
    def rows(self) -> PartPlace | None:
        return self._rows

    @cached_property
    def own_shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.own_part(torch.empty(self.shape, device="meta")).shape

    @property
    def own_start(self) -> tuple[int, ...]:
        raise self.refusal("A checkpoint of torch.distributed")

    def own_part(self, whole: Tensor) -> Tensor:
        share = self._share.share_of(self.name, whole)
        return self._rows.own_part(share) if self._rows else share

    def own_of(self, other: Tensor) -> Tensor:
        is_broadcast = all(size == 1 for size in other.shape)
        return (
            other
            if other.shape == self.own_shape or is_broadcast
            else self.own_part(other.expand(self.shape))
        )

    def is_as(self, other: TensorPlace) -> bool:
        if not isinstance(other, SharePlace) or self._share is not other._share:
            return False
        return self._share.same(self.name, other.name)

    def whole_of(self, part: Tensor) -> Tensor:
        return self._share.gathered(self.name, part)

    def counted(self, part: Tensor) -> Tensor:
        if isinstance(self._counts, Tensor):
            return part.reshape(-1)[self._counts.to(part.device)]
        return part if self._counts else part.reshape(-1)[:0]

    def refusal(self, what: str) -> PartError:
        return refusal_of(
            f"{what} of {self.name} {list(self.shape)}: this rank has a share of {list(self.own_shape)}."
        )
