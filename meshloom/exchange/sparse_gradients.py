"""Gradients with few rows (`nn.Embedding(sparse=True)`) are sent as row indices and values.

    rank 0    rows 7, 2       values [2, width]       counts: 2, 1, -1  (exchanged first: all pad to the largest)
    rank 1    row  7          values [1, width]       sum: row 2 of rank 0, row 7 of rank 0 + that of rank 1
    rank 2    not used

Every rank gathers all rows and adds them up in rank order, so the sum has the same bits on all ranks. Which
rows were used is part of the gradient, even where a row's values are 0: an optimizer such as SparseAdam
updates exactly those rows. All other parameters are another exchange's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group, Work
from meshloom.core.errors import TrainingError
from meshloom.core.losses.loss_sum import Divisor, divides
from meshloom.core.step_shape import StepShape
from meshloom.exchange.alone import Unbuffered
from meshloom.exchange.exchange import Emit, Ownership, Ready, Slice
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

NOT_USED = -1


class SparseGradients(Unbuffered):
    """Of `named`, whose gradients are sparse, with one sparse dim, the first.

    group: the replicas; None: this one takes its own gradients. beside: who owns the other parameters; where
    these have owners, each owns an even share of the elements of `named`, too. slices: what this rank keeps
    of `named`, where it keeps no more. kept: names of parameters whose optimizer takes sparse gradients.
    `finish` returns those as sparse tensors, of the parameter's shape where all of it is owned, else of one
    dim. sparse_only: names of those whose optimizer takes no others, so that a dense gradient is an error.
    used_rows: of a name, the rows that were used in the step, where gradients arrive dense; None: they arrive
    sparse.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group | None,
        beside: Ownership,
        *,
        slices: Sequence[Slice],
        kept: Collection[str],
        sparse_only: Collection[str],
        used_rows: Callable[[str], Tensor | None],
    ) -> None:
        self._named, self._group = list(named), group
        self._kept, self._sparse_only = frozenset(kept), frozenset(sparse_only)
        self._used_rows = used_rows
        assert beside.memory != "shared", "parameters with sparse gradients are not shared"
        self._shares = [
            [_share(name, each, owner, beside.num_owners) for name, each in self._named]
            for owner in range(beside.num_owners)
        ]
        here = group.rank if group is not None and beside.owners is not None else 0
        mine = self._shares[here] if here < beside.num_owners else []
        self._mine = [each for each in mine if each.start < each.stop]
        if beside.memory == "sliced":
            self._mine = list(slices)
        self.ownership = replace(beside, owned=self._mine)
        self._arrived: dict[int, list[Tensor]] = {}  # by id of the parameter, of every chunk so far
        self._whole: dict[str, Tensor | None] = {}  # of the newest step, averaged
        self._sent: Counter[str] = Counter()

    def begin(self, shape: StepShape) -> None:
        self._arrived = {id(parameter): [] for _, parameter in self._named}
        for _, parameter in self._named:
            parameter.grad = None

    def hook(self, parameter: nn.Parameter) -> Ready:
        return self._take

    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            arrived, gradient = self._arrived[id(parameter)], parameter.grad
            if arrived and arrived[-1].layout == gradient.layout == torch.strided:
                arrived[-1].add_(gradient)
            else:
                arrived.append(gradient)
            parameter.grad = None

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        for _, parameter in self._named:
            self._take(parameter)  # if it was not reported as ready
        mine = [self._add_up(name, parameter) for name, parameter in self._named]
        self._arrived = {id(parameter): [] for _, parameter in self._named}
        sums = _Sums(self._named, self._group, self._sent).sums(mine) if self._group else mine
        for total in sums if divides(weight) else ():
            if total is not None:
                total.values().div_(weight)
        self._whole = {name: total for (name, _), total in zip(self._named, sums, strict=True)}
        return [self._of_slice(each) for each in self._mine]

    def publish(self) -> bool:
        works: list[Work] = []
        if self._group is not None and self.ownership.owners is not None and self.ownership.memory == "whole":
            for owner, shares in enumerate(self._shares):
                for each in shares:
                    if each.start < each.stop:
                        works.append(self._group.broadcast(each.data(), owner))
                        self._sent["broadcast"] += (each.stop - each.start) * each.parameter.element_size()
        for work in works:
            work.wait()
        return False

    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        dropped = {
            each.name for each, gradient in zip(self._mine, gradients, strict=True) if gradient is None
        }
        for name, total in self._whole.items():
            if name in dropped:
                total = None
            elif total is not None and (name not in self._kept or self._used_rows(name) is not None):
                total = total.to_dense()  # ranks that gather shards of it gather dense ones
            emit(name, total)

    def expected_bytes(self) -> ExpectedBytes:
        return ExpectedBytes(so_far=Traffic({"dp": dict(self._sent)}))

    def notes(self) -> list[str]:
        """For the user, before the first step."""
        if self._group is None:
            return []
        # a count, and all rows
        most = sum(8 + len(each) * (8 + _width(each) * each.element_size()) for _, each in self._named)
        return [
            f"Embeddings with sparse=True send the rows that a step uses, so the bytes are known only afterwards (at most {most:,} bytes of gradients "
            "a step): the predicted bytes at the end are computed from the rows that were used."
        ]

    def _add_up(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """This replica's gradient over all chunks, with each row once, in order."""
        arrived, used = self._arrived[id(parameter)], self._used_rows(name)
        if used is not None and arrived:
            (dense,) = arrived
            rows = used | (dense != 0).flatten(1).any(1)
            if name in self._sparse_only and not torch.equal(rows, used):
                raise _is_dense(name)
            return _coalesced(rows.nonzero()[:, 0], dense[rows], parameter)
        if name in self._sparse_only and any(each.layout == torch.strided for each in arrived):
            raise _is_dense(name)
        if not arrived:
            return None
        sparse = [_of_rows(each) for each in arrived]
        indices = torch.cat([each.indices()[0] for each in sparse])
        return _coalesced(indices, torch.cat([each.values() for each in sparse]), parameter)

    def _of_slice(self, owned: Slice) -> Tensor | None:
        total = self._whole[owned.name]
        if total is None:
            return None
        if owned.name not in self._kept:
            return total.to_dense().reshape(-1)[owned.start : owned.stop]
        if owned.is_full:
            return total.clone()  # clipping scales it, and `gather` is of what was before
        width = _width(owned.parameter)
        at = (total.indices()[0][:, None] * width + torch.arange(width, device=total.device)).reshape(-1)
        inside = (at >= owned.start) & (at < owned.stop)
        values = total.values().reshape(-1)[inside]
        # Not marked as coalesced, although it is: when adding such a tensor of one dim to a view, torch 2.13
        # writes beyond the view (twice its offset).
        return torch.sparse_coo_tensor(
            (at[inside] - owned.start)[None], values, (owned.stop - owned.start,), check_invariants=False
        )


class _Sums:
    """Sums of the gradients of `named` over the replicas of `group`. sent: bytes so far."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: Group, sent: Counter[str]) -> None:
        self._named, self._group, self._sent = named, group, sent

    def sums(self, mine: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sum over all ranks, with the same bits on each. mine: of each parameter this rank's."""
        group = self._group
        device = self._named[0][1].device
        counts = torch.tensor(
            [NOT_USED if each is None else each.values().shape[0] for each in mine],
            dtype=torch.int64,
            device=device,
        )
        everyone = counts.new_empty(group.size * len(mine))
        group.all_gather(everyone, counts).wait()
        self._sent["all_gather"] += counts.nbytes
        table: list[list[int]] = everyone.view(group.size, len(mine)).T.tolist()
        sums = [
            _Sum(each, parameter, used, group) if max(used) != NOT_USED else None
            for each, (_, parameter), used in zip(mine, self._named, table, strict=True)
        ]
        self._sent["all_gather"] += sum(each.num_bytes for each in sums if each is not None)
        return [each.finish() if each is not None else None for each in sums]


class _Sum:
    """A sum that is gathered as rows, padded to the largest number of rows of a rank. num_bytes: that this rank sends."""

    def __init__(
        self, mine: Tensor | None, parameter: nn.Parameter, counts: Sequence[int], group: Group
    ) -> None:
        self._parameter, self._counts = parameter, [max(0, count) for count in counts]
        most, width, own = max(self._counts), _width(parameter), self._counts[group.rank]
        indices = torch.zeros(most, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(most, width, dtype=parameter.dtype, device=parameter.device)
        if mine is not None:
            indices[:own] = mine.indices()[0]
            values[:own] = mine.values().reshape(own, width)
        self.num_bytes = indices.nbytes + values.nbytes
        self._indices, self._values = (
            indices.new_empty(group.size * most),
            values.new_empty(group.size * most * width),
        )
        self._works = [
            group.all_gather(self._indices, indices),
            group.all_gather(self._values, values.view(-1)),
        ]

    def finish(self) -> Tensor:
        for work in self._works:
            work.wait()
        n, most = len(self._counts), max(self._counts)
        indices, values = self._indices.view(n, most), self._values.view(n, most, *self._parameter.shape[1:])
        return _coalesced(
            torch.cat([indices[rank, :count] for rank, count in enumerate(self._counts)]),
            torch.cat([values[rank, :count] for rank, count in enumerate(self._counts)]),
            self._parameter,
        )


def _is_dense(name: str) -> TrainingError:
    return TrainingError(
        f"The gradient of {name} is dense, and its optimizer (SparseAdam) takes sparse ones only. Give it a dense optimizer such as Adam, or use "
        "the parameter in nn.Embedding(sparse=True) alone, not also as another layer's weight."
    )


def _share(name: str, parameter: nn.Parameter, owner: int, num_owners: int) -> Slice:
    n = parameter.numel()
    return Slice(name, parameter, n * owner // num_owners, n * (owner + 1) // num_owners)


def _width(parameter: Tensor) -> int:
    """Elements of a row."""
    return parameter[:1].numel()


def _of_rows(gradient: Tensor) -> Tensor:
    """The gradient coalesced, with one sparse dim. Rows of zeros of a dense gradient count as not used."""
    if gradient.layout != torch.strided and gradient.sparse_dim() == 1:
        return gradient.coalesce()
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return dense.to_sparse(1).coalesce()


def _coalesced(rows: Tensor, values: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the sum of rows [n] with values [n, ...]."""
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False).coalesce()
