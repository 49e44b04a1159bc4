"""This replica's share of a batch that every rank has whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from meshloom.core.cache import digest_of
from meshloom.core.errors import DataError
from meshloom.loops.ranks import ranks
from meshloom.loops.taken_shares import TakenShare, saw_whole, share_of, share_sizes, took
from meshloom.parameters.digest import digest

Dims = int | Mapping[Any, int | None]
Keys = tuple[Hashable, ...]  # where an entry is
_TOO_SMALL = 3  # so many at first are no accident


def share(x: Any, dim: Dims = 0) -> Any:
    """This replica's rows of `x`, which every rank has whole: a tensor, or tuples, lists, mappings and dataclasses of such.

    dim: that of the batch; by name (or number) of an entry where they differ, None for what is whole on every rank: other entries
        have 0. Numbers, strings and tensors without a dim are returned as they are; a list of other things that is as long as the batch is
        divided, too.

    Rows are consecutive, larger shares first. A replica without any has the last one again, which counts nothing (`ml.mean`,
    gradients); outside of grad mode it has none. One replica has `x` itself. Raises `DataError` for entries of different lengths, for a share
    of a share, and where the first batches are all smaller than there are replicas.
    """
    here = ranks()
    return _sharer(here.replica, here.plan.dp).share(x, dim)


class Sharer:
    """Divides batches among `replicas`, of which this is number `replica`."""

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas
        self._too_small: int | None = 0  # of the first batches; None: one was not

    def share(self, x: Any, dim: Dims = 0) -> Any:
        """As the function."""
        if self.replicas == 1:
            return x
        for keys, each in _entries(x):
            before = share_of(each) if isinstance(each, Tensor) else None
            if before is not None:
                raise DataError(
                    f"{_name(keys)} is a replica's share already, of {sum(before.sizes)} samples: ml.share and ml.loader each take one. Leave one out."
                )
        samples = length_of(x, dim)
        saw_whole(lambda: digest_of(str([_digest(each) for _, each in _entries(x)])))
        trains = torch.is_grad_enabled()
        taken = self.of(samples) if trains else TakenShare(share_sizes(samples, self.replicas), self.replica)
        found = rows(x, taken, dim, samples, never_empty=trains)
        if samples:
            whole = {id(each) for _, each in _entries(x)}
            took(taken, [each for _, each in _entries(found) if id(each) not in whole])
        return found

    def of(self, samples: int) -> TakenShare:
        """This replica's share of a batch. Raises `DataError` where the first ones are all smaller than there are replicas."""
        if self._too_small is not None:
            self._too_small = self._too_small + 1 if samples < self.replicas else None
        if self._too_small == _TOO_SMALL:
            raise too_small(samples, self.replicas)
        return TakenShare(share_sizes(samples, self.replicas), self.replica)


def too_small(samples: int, replicas: int) -> DataError:
    """The refusal of batches that cannot give each replica a sample."""
    return DataError(
        f"Batch size {samples} is the global one; dp={replicas} needs {replicas} or more, a sample for each replica. Take a larger batch, or a smaller dp."
    )


def stretch(taken: TakenShare, *, never_empty: bool = True) -> slice:
    """The samples of this share within the global batch.

    >>> stretch(TakenShare((2, 1), 1)), stretch(TakenShare((1, 0), 1))
    (slice(2, 3, None), slice(0, 1, None))
    """
    if taken.sizes[taken.replica] or not never_empty:
        return slice(taken.start, taken.start + taken.sizes[taken.replica])
    samples = sum(taken.sizes)
    return slice(max(samples - 1, 0), samples)


def rows(x: Any, taken: TakenShare, dim: Dims, samples: int, *, never_empty: bool = True) -> Any:
    """The rows of `taken` in each entry of `x`, a batch of `samples`. Raises `DataError` for an entry that is not so long."""
    part = stretch(taken, never_empty=never_empty)
    lengths = {keys: _length(each, found) for keys, each, found in _with_dims(x, dim, samples)}
    if any(length != samples for length in lengths.values()):
        told = ", ".join(
            f"{_name(keys)} {'none' if length is None else length}" for keys, length in lengths.items()
        )
        odd = next(keys for keys, length in lengths.items() if length != samples)
        key = odd[-1] if odd else "name"
        raise DataError(
            f"A batch of {samples} samples has entries of other lengths along its dim: {told}. Say which dim is the batch, None for what is whole on "
            f"every rank: ml.share(batch, dim={{{key!r}: None}})."
        )

    def cut(keys: Keys, each: Any) -> Any:
        found = _dim(keys, dim)
        if isinstance(each, list | tuple):
            return each if found is None else cast(Any, each)[part]
        if found is None or not each.ndim:
            return each
        taken_rows = each[(slice(None),) * (found % each.ndim) + (part,)]
        # a script may count on the layout of the whole
        return taken_rows.contiguous() if isinstance(each, Tensor) and each.is_contiguous() else taken_rows

    return _mapped(x, cut, _Lists(samples, dim))


def length_of(x: Any, dim: Dims = 0) -> int:
    """Samples of the batch `x`: of its first tensor that has a batch dim, else of its first list."""
    for keys, each in _entries(x):
        found = _dim(keys, dim)
        if isinstance(each, Tensor | numpy.ndarray) and each.ndim and found is not None:
            length = _length(each, found)
            if length is not None:
                return length
    for each in (x, *(x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ())):
        if isinstance(each, list):
            return len(cast(list[Any], each))
    raise DataError(
        f"ml.share takes a tensor, or a structure of tensors that have a batch dim, and got {type(x).__name__} without any."
    )


_sharer = cache(Sharer)


def _digest(entry: Tensor | numpy.ndarray) -> object:
    """Of a batch, as far as it has one."""
    if isinstance(entry, Tensor):
        return int(digest(entry.detach())) if entry.layout == torch.strided else None
    return None if entry.dtype.hasobject else entry.tobytes()


class _Lists:
    """Which lists hold one thing for each of `samples`, and not entries of the batch."""

    def __init__(self, samples: int, dim: Dims) -> None:
        self._samples, self._dim = samples, dim

    def __call__(self, keys: Keys, values: list[Any] | tuple[Any, ...]) -> bool:
        if len(values) != self._samples or hasattr(values, "_fields"):
            return False
        if not any(isinstance(each, Tensor | numpy.ndarray | list | tuple) for each in values):
            return True  # targets, names, numbers
        lengths = {_length(each, _dim((*keys, *inner), self._dim) or 0) for inner, each in _entries(values)}
        return bool(keys) and bool(lengths - {None, self._samples} or lengths == {None})


def _with_dims(x: Any, dim: Dims, samples: int) -> Iterator[tuple[Keys, Any, int]]:
    """What is divided: each entry with its keys, and its dim."""
    for keys, each in _entries(x, _Lists(samples, dim)):
        found = _dim(keys, dim)
        if found is not None and (isinstance(each, list | tuple) or each.ndim):
            yield keys, each, found


def _length(x: Any, dim: int) -> int | None:
    """None: it has no such dim."""
    if isinstance(x, list | tuple):
        return len(cast(list[Any], x))
    return x.shape[dim] if -x.ndim <= dim < x.ndim else None


def _dim(keys: Keys, dim: Dims) -> int | None:
    if isinstance(dim, int):
        return dim
    return next((dim[key] for key in reversed(keys) if key in dim), 0)


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys)) or "the tensor"


def _entries(x: Any, is_entry: _Lists | None = None) -> list[tuple[Keys, Any]]:
    """Tensors and arrays, and lists of which that holds, each with its keys."""
    found: list[tuple[Keys, Any]] = []

    def note(keys: Keys, each: Any) -> Any:
        found.append((keys, each))
        return each

    _mapped(x, note, is_entry)
    return found


def _mapped(x: Any, change: Callable[[Keys, Any], Any], is_entry: _Lists | None, keys: Keys = ()) -> Any:
    """`x` with its entries changed."""

    def within(key: Hashable, value: Any) -> Any:
        return _mapped(value, change, is_entry, (*keys, key))

    if isinstance(x, Tensor | numpy.ndarray):
        return change(keys, x)
    if isinstance(x, Mapping):
        changed: Any = copy.copy(cast(Mapping[Any, Any], x))  # of its class, with all else that it has
        for key in list(changed):
            changed[key] = within(key, changed[key])
        return changed
    if isinstance(x, list | tuple):
        values = cast(list[Any] | tuple[Any, ...], x)
        if is_entry is not None and is_entry(keys, values):
            return change(keys, values)
        parts = [within(key, value) for key, value in enumerate(values)]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{each.name: within(each.name, getattr(x, each.name)) for each in fields(x)})
    if any(isinstance(each, Tensor) for each in getattr(x, "__dict__", {}).values()):
        raise DataError(
            f"{_name(keys)} is a {type(x).__name__}, which holds tensors and of which no rows are known. Share its tensors: ml.share((x.a, x.b))."
        )
    return x
