"""A batch as a list of tensors, and back: whatever it is built of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Rebuild = Callable[[Iterator[Tensor]], Any]


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The tensors of a batch, by name in order, and what builds a batch like it from others."""

    tensors: dict[str, Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]


def leaves_of(batch: Any) -> Leaves:
    """Take a batch apart: mappings, lists, tuples, named tuples, dataclasses and packed sequences. The rest of it stays.

    >>> import torch
    >>> leaves = leaves_of({"x": torch.ones(2), "more": [torch.zeros(1), "a"]})
    >>> list(leaves.tensors)
    ['x', 'more.0']
    >>> leaves.rebuild([torch.zeros(1), torch.ones(1)])
    {'x': tensor([0.]), 'more': [tensor([1.]), 'a']}
    """
    found: dict[str, Tensor] = {}
    rebuild = _take_apart(batch, "", found)
    return Leaves(found, lambda tensors: rebuild(iter(tensors)))


def _take_apart(tree: Any, name: str, found: dict[str, Tensor]) -> Rebuild:
    if isinstance(tree, Tensor):
        found[name or "batch"] = tree
        return next
    if isinstance(tree, PackedSequence):  # its sizes stay on the CPU and decide how often the cell runs: not data
        packed: Any = tree
        take = _take_apart(packed.data, _join(name, "data"), found)
        return lambda tensors: PackedSequence(take(tensors), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    if isinstance(tree, Mapping):
        parts = {key: _take_apart(value, _join(name, key), found) for key, value in tree.items()}
        return lambda tensors: _like_mapping(tree, {key: take(tensors) for key, take in parts.items()})
    if isinstance(tree, list | tuple):
        takes = [_take_apart(value, _join(name, number), found) for number, value in enumerate(tree)]
        return lambda tensors: _like_sequence(tree, [take(tensors) for take in takes])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: _take_apart(getattr(tree, field.name), _join(name, field.name), found) for field in dataclasses.fields(tree)}
        return lambda tensors: _like_dataclass(tree, {key: take(tensors) for key, take in fields.items()})
    return lambda tensors: tree


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _like_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(tree, MutableMapping):
        return items
    like = copy.copy(tree)  # a subclass may have more to it than its items
    for key, value in items.items():
        like[key] = value
    return like


def _like_sequence(tree: Any, values: list[Any]) -> Any:
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _like_dataclass(tree: Any, values: dict[str, Any]) -> Any:
    like = copy.copy(tree)
    for key, value in values.items():
        object.__setattr__(like, key, value)  # frozen ones too
    return like
