"""Whether code asks for a value that depends on some of its parameters.

    h = relu(x @ up.T)                    up: some of the hidden units on each rank
    if h.norm() > 60:                     another norm on each
        h = h * (60 / h.norm())
    return h @ down.T

A trial with small numbers never comes to the line within the `if`, and a step may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.program.opaque.statements import wanted_answer

_ATEN: Any = torch.ops.aten
_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ONLY_TAKES = {_ATEN.index.Tensor}  # with a mask, as many elements as values say, which stay with their units


class AskedOfUnits:
    """Follows what is computed from `parts`, forward and backward, and notes whether code asks for its values."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.has_asked = False
        self._storages: dict[int, Any] = {}  # kept, so that no other gets their places
        for each in parts:
            self._follow(each)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which code runs."""
        with _Operators(self._ran), _Functions(self._takes_all) as self._functions:
            yield

    def _ran(self, operator: Any, given: Any, written: Any, made: Any) -> None:
        if not self._are_followed(given):
            return
        asks = not _ASKS.isdisjoint(operator.tags) and operator not in _ONLY_TAKES
        self.has_asked |= asks and not self._functions.only_looks
        for each in tree_leaves((made, written)):
            self._follow(each)

    def _takes_all(self, given: Any) -> None:
        self.has_asked |= self._are_followed(given)

    def _are_followed(self, values: Any) -> bool:
        storages = map(_storage, tree_leaves(values))
        return any(each is not None and each._cdata in self._storages for each in storages)

    def _follow(self, value: Any) -> None:
        storage = _storage(value)
        if storage is not None:
            self._storages[storage._cdata] = storage


def _storage(value: Any) -> Any:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage() if is_dense else None


class _Operators(TorchDispatchMode):
    def __init__(self, ran: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        made = func(*args, **named)
        arguments = func._schema.arguments if func._schema.is_mutable else ()
        by_name = {**dict(zip((each.name for each in arguments), args, strict=False)), **named}
        is_written = {each.name: each.alias_info and each.alias_info.is_write for each in arguments}
        self._ran(func, (args, named), [each for name, each in by_name.items() if is_written.get(name)], made)
        return made


class _Functions(TorchFunctionMode):
    """only_looks: whether a statement asks that only raises, prints or warns."""

    only_looks = False

    def __init__(self, takes_all: Callable[[Any], None]) -> None:
        super().__init__()
        self._takes_all = takes_all

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("numpy", "tolist"):  # which call no operator
            self._takes_all(args)
        self.only_looks = name == "__bool__" and wanted_answer() is not None
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.only_looks = False
