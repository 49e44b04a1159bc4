"""A batch as a list of tensors and other values, and back, whatever containers it is built of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Rebuild = Callable[[Iterator[Tensor], Mapping[str, Any]], Any]


class Leaves(NamedTuple):
    """The tensors of a batch, by name in order, and a function that rebuilds the batch from others.

    values: what else it holds, by name: numbers, texts, objects. A list counts as one value if it holds no
    tensors and is not all floats. rebuild: of tensors in order, and of values by name; values left out stay.
    """

    tensors: dict[str, Tensor]
    rebuild: Callable[..., Any]
    values: dict[str, Any]

    @property
    def device(self) -> torch.device | None:
        """Device of its first tensor."""
        return next((each.device for each in self.tensors.values()), None)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Name, shape and dtype of each tensor."""
        return tuple((name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in self.tensors.items())


def leaves_of(batch: Any) -> Leaves:
    """The leaves of mappings, lists, tuples, named tuples, dataclasses, packed sequences, and objects with tensors as
    attributes.

    >>> import torch
    >>> leaves = leaves_of({"x": torch.ones(2), "more": [torch.zeros(1), "a"]})
    >>> list(leaves.tensors), leaves.values
    (['x', 'more.0'], {'more.1': 'a'})
    >>> leaves.rebuild([torch.zeros(1), torch.ones(1)])
    {'x': tensor([0.]), 'more': [tensor([1.]), 'a']}
    >>> leaves.rebuild([torch.zeros(1), torch.ones(1)], {"more.1": "b"})
    {'x': tensor([0.]), 'more': [tensor([1.]), 'b']}
    """
    found = Leaves({}, lambda tensors, values: None, {})
    rebuild = _take_apart(batch, "", found)

    def rebuilt(tensors: Sequence[Tensor], values: Mapping[str, Any] | None = None) -> Any:
        return rebuild(iter(tensors), values or {})

    return found._replace(rebuild=rebuilt)


def copy_of(leaf: Tensor) -> Tensor:
    """A copy without history, which requires gradients where the leaf does."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def holds_tensors_itself(value: Any) -> bool:
    """Whether a value is an object of the user's with tensors among its attributes, and no `to` that moves them."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | nn.Module) or hasattr(value, "to"):
        return False
    return any(isinstance(each, Tensor) for each in vars(value).values())


def _take_apart(tree: Any, name: str, found: Leaves) -> Rebuild:
    if isinstance(tree, Tensor):
        found.tensors[name or "batch"] = tree
        return lambda tensors, values: next(tensors)
    if isinstance(tree, PackedSequence):
        packed: Any = tree
        data = _take_apart(packed.data, _join(name, "data"), found)
        # these stay on the CPU and decide how many steps the cell runs
        sizes = _value(packed.batch_sizes, _join(name, "batch_sizes"), found)
        orders = [
            _take_apart(getattr(packed, each), _join(name, each), found)
            for each in ("sorted_indices", "unsorted_indices")
        ]
        return lambda tensors, values: PackedSequence(
            data(tensors, values), sizes(tensors, values), *(each(tensors, values) for each in orders)
        )
    if isinstance(tree, Mapping):
        parts = _parts(tree, name, found)
        return lambda tensors, values: _like_mapping(tree, parts(tensors, values))
    if isinstance(tree, list | tuple) and (
        _holds_tensors(tree)
        or hasattr(tree, "_fields")
        or (tree and all(type(each) is float for each in tree))
    ):
        takes = [_take_apart(value, _join(name, number), found) for number, value in enumerate(tree)]
        return lambda tensors, values: _like_sequence(tree, [take(tensors, values) for take in takes])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = _parts(_fields(tree), name, found)
        return lambda tensors, values: _like_object(tree, fields(tensors, values))
    if holds_tensors_itself(tree):
        attributes = _parts(vars(tree), name, found)
        return lambda tensors, values: _like_object(tree, attributes(tensors, values))
    return _value(tree, name, found)


def _parts(items: Mapping[Any, Any], name: str, found: Leaves) -> Rebuild:
    takes = {key: _take_apart(value, _join(name, key), found) for key, value in items.items()}
    return lambda tensors, values: {key: take(tensors, values) for key, take in takes.items()}


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _value(value: Any, name: str, found: Leaves) -> Rebuild:
    found.values[name or "batch"] = value
    return lambda tensors, values: values.get(name or "batch", value)


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_holds_tensors, tree.values()))
    if isinstance(tree, list | tuple):
        return any(map(_holds_tensors, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return any(map(_holds_tensors, _fields(tree).values()))
    return isinstance(tree, Tensor)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _like_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(tree, MutableMapping):
        return items
    like = copy.copy(tree)  # a subclass may have state besides its items
    for key, value in items.items():
        like[key] = value
    return like


def _like_sequence(tree: Any, values: list[Any]) -> Any:
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _like_object(tree: Any, values: dict[str, Any]) -> Any:
    like = copy.copy(tree)
    for key, value in values.items():
        object.__setattr__(like, key, value)  # frozen ones too
    return like
