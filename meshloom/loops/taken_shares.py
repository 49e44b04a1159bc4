"""The shares of global batches that this replica has taken: what a gradient, or a mean, of a share counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.plan_shares import chunk_sizes
from meshloom.parameters.digest import digest


class TakenShare(NamedTuple):
    """sizes: samples of each replica that count, or what counts in their place (`counted_as`). replica: whose share it is.

    A replica whose size is 0 has one sample all the same, which counts nothing: no share is empty.
    """

    sizes: tuple[float, ...]
    replica: int

    @property
    def start(self) -> int:
        """The first row of the global batch that is this replica's."""
        return int(sum(self.sizes[: self.replica]))

    @property
    def rows(self) -> int:
        """Samples that the script has, of which none may count."""
        return int(self.sizes[self.replica]) or 1

    @property
    def is_even(self) -> bool:
        """Whether all replicas' shares count the same."""
        return len(set(self.sizes)) == 1

    @property
    def weight(self) -> float:
        """What the mean over this share counts in the mean over the global batch, times the number of replicas: 1 where
        shares are even."""
        return self.sizes[self.replica] * len(self.sizes) / sum(self.sizes)


def share_sizes(samples: int, replicas: int) -> tuple[int, ...]:
    """Samples of each replica in a global batch, larger shares first.

    >>> share_sizes(7, 3), share_sizes(1, 2)
    ((3, 2, 2), (1, 0))
    """
    return tuple(chunk_sizes(samples, replicas))


_RECENT: deque[TakenShare] = deque(maxlen=16)
_OF_TENSOR: Any = WeakIdKeyDictionary()
_BOUND: list[TakenShare] = []
_COUNTED: list[TakenShare] = []
_WHOLE: list[str] = []  # digests of the first batches of which it has taken shares
_FIRST_WHOLE = 3


def took(share: TakenShare, batch: Any = None) -> None:
    """The script has this share from now on, of which are the tensors of `batch`."""
    if not _RECENT or _RECENT[-1] != share:
        _RECENT.append(share)
    for each in tensors_in(batch):
        _OF_TENSOR[each] = share


def saw_whole(digest_of_batch: Callable[[], str]) -> None:
    """The script takes a share of a batch, which is the same on every rank: its indices, samples or tensors."""
    if len(_WHOLE) < _FIRST_WHOLE:
        _WHOLE.append(digest_of_batch())


def first_whole() -> list[str]:
    """Digests of the first of them."""
    return [*_WHOLE]


def bind(inputs: Any) -> TakenShare | None:
    """The share that a module is called with: that of which one of `inputs` is, or is a view; where the script has made new tensors of it, the
    newest that has as many rows as one of them, else the newest. Until the next call it is what `ml.mean` counts by. None: the script has
    taken none."""
    found = _COUNTED[-1] if _COUNTED else _RECENT[-1] if _RECENT else None
    if len(_RECENT) > 1 and not _COUNTED:
        given = tensors_in(inputs)
        of_rows = (share for share in reversed(_RECENT) if any(share.rows in each.shape for each in given))
        of_tensors = (_OF_TENSOR.get(one) for each in given for one in (each, each._base) if one is not None)
        found = next(filter(None, of_tensors), None) or next(of_rows, found)
    _BOUND[:] = [found] if found else []
    return found


@contextmanager
def counted_as(share: TakenShare) -> Iterator[None]:
    """A context whose calls are of this share, such as one that counts what a loss is a mean over in place of samples."""
    _COUNTED.append(share)
    try:
        yield
    finally:
        _COUNTED.pop()


def share_of(tensor: Tensor) -> TakenShare | None:
    """The share that this tensor is; None: it is none, or was computed from one."""
    return _OF_TENSOR.get(tensor)


def shares_of(inputs: Any) -> list[TakenShare]:
    """Those of its tensors."""
    return [found for each in tensors_in(inputs) if (found := share_of(each))]


def newest() -> TakenShare | None:
    """The share that the script has taken last."""
    return _RECENT[-1] if _RECENT else None


def is_alike(replicas: Group, inputs: Any) -> bool:
    """Whether a script that takes no shares calls a module with the same tensors on all replicas, which compute the same."""
    if replicas.size == 1 or newest() is not None:
        return False
    given = [int(digest(each.detach())) for each in tensors_in(inputs) if each.layout == torch.strided]
    everyone = collect(replicas, given)
    return bool(given) and all(each == given for each in everyone)


def rows_weight(replicas: Group, rows: Tensor) -> float | None:
    """Of rows that the newest call has computed, the weight of its share; None: all replicas have the same rows."""
    share = bound()
    return share.weight if share else None if is_alike(replicas, rows) else 1.0


def bound() -> TakenShare | None:
    """The share of the newest call of a module; before one, the newest taken."""
    return _BOUND[0] if _BOUND else _RECENT[-1] if _RECENT else None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]
