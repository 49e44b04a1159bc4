"""Notices whether a function uses the values of tensors that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.parameters.construction.exits import Exits
from meshloom.parameters.construction.operators import kind_of
from meshloom.parameters.construction.tape import address


class ValueReadError(Exception):
    """A value is used that is not there."""


class ValueReads(TorchDispatchMode):
    """A context that notes whether an operator, or an array, uses the values of one of `tensors`.

    refused: such a use raises `ValueReadError`, as the tensors have no memory.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds

    def __init__(self, tensors: Iterable[Tensor], *, refused: bool = False) -> None:
        super().__init__()
        self.found, self._refused = False, refused
        self._addresses = {address(each.untyped_storage()) for each in tensors}
        self._within = ExitStack()

    def __enter__(self) -> ValueReads:
        self._within.enter_context(Exits(self))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._within.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind = kind_of(func)
        if not (kind.is_view or kind.changes_view or kind.is_metadata or kind.by_shape):
            given = (each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor))
            if not all(self.has_values(each) for each in given):
                self._note()
        return func(*args, **(kwargs or {}))

    def has_values(self, tensor: Tensor) -> bool:
        return address(tensor.untyped_storage()) not in self._addresses

    def computed(self, tensor: Tensor) -> Tensor:
        self._note()
        return tensor

    def _note(self) -> None:
        self.found = True
        if self._refused:
            raise ValueReadError

    def truncated_normal(
        self, function: Callable[..., Tensor], tensor: Tensor, *bounds: float, generator: Any
    ) -> Tensor:
        return function(tensor, *bounds, generator=generator)
