"""What an ATen operator does to its arguments, as far as a tape must know: what it reads, writes and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten
_FILLS = {"normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "zero_", "fill_", "copy_", "bernoulli_"}  # fmt: skip
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
_METADATA = {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_pinned", "is_same_size", "device", "is_contiguous"}  # fmt: skip
# views by another name
_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


@dataclass(frozen=True, kw_only=True)
class OperatorKind:
    """What an operator does.

    is_view: its result lies in its argument's storage. changes_view, resizes: it changes how its argument
        lies there, or the size. draws: it takes random numbers. overwrites: what it writes depends on nothing
        that was there. by_shape: it uses its arguments for their shapes alone. is_empty: it makes memory
        without values. writes: names or numbers of arguments. depends: whether shapes or decisions depend on
        values.
    """

    name: str
    is_view: bool = False
    changes_view: bool = False
    resizes: bool = False
    may_resize: bool = False
    draws: bool = False
    overwrites: bool = False
    by_shape: bool = False
    is_empty: bool = False
    is_metadata: bool = False
    depends: bool = False
    indexed: bool = False
    takes_device: bool = False
    writes: tuple[int | str, ...] = ()
    returns: tuple[int | str | None, ...] = ()

    def reads_values(self, args: Sequence[Any]) -> bool:
        """Whether it cannot be recorded without the values of its arguments."""
        if self.indexed:
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            return bool(masks) and self.depends
        return self.depends

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors among the arguments that it writes."""
        return [
            each
            for argument in self.writes
            for each in tree_leaves(_argument(argument, args, kwargs))
            if isinstance(each, Tensor)
        ]

    def result_of(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shapes: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any],
    ) -> Any:
        """What an operator that writes returns: what it writes, and new tensors."""
        if None not in self.returns:
            found = [_argument(each, args, kwargs) for each in self.returns]  # type: ignore[arg-type]
        else:
            made = shapes(func, args, kwargs)
            made = made if isinstance(made, tuple) else (made,)
            found = [
                torch.empty_strided(new.shape, new.stride(), dtype=new.dtype)
                if argument is None and isinstance(new, Tensor)
                else _argument(argument, args, kwargs)
                for argument, new in zip(self.returns, made, strict=True)
            ]
        return None if not found else found[0] if len(found) == 1 else tuple(found)


@lru_cache(maxsize=4096)
def kind_of(func: Any) -> OperatorKind:
    """What an operator does, by its schema and tags."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    writes: list[int | str] = []
    by_alias: dict[Any, int | str] = {}
    for number, each in enumerate(schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            writes.append(each.name if each.kwarg_only else number)
            by_alias[frozenset(each.alias_info.before_set)] = writes[-1]
    if name == "native_batch_norm":  # writes them, and its schema does not say so
        writes = [3, 4]
    returns = tuple(
        by_alias.get(frozenset(each.alias_info.before_set))
        if each.alias_info is not None and each.alias_info.is_write
        else None
        for each in schema.returns
    )
    has_tensors = any("Tensor" in str(each.type) for each in schema.returns)
    tags = set(func.tags)
    is_out = any(each.is_out for each in schema.arguments)  # Tag.out says the same, from torch 2.13 on
    return OperatorKind(
        name=name,
        is_view=func.is_view or func in _VIEWS,
        changes_view=torch.Tag.inplace_view in tags,
        resizes=name.startswith("resize"),
        may_resize=is_out,
        draws=torch.Tag.nondeterministic_seeded in tags,
        overwrites=is_out or (name in _FILLS and bool(writes)),
        by_shape=name.endswith("_like") or name.startswith("new_"),
        is_empty=name in _EMPTY and not writes,
        is_metadata=name in _METADATA,
        depends=bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & tags)
        or not (has_tensors or writes),
        indexed=func in _INDEXED,
        takes_device=any(each.name == "device" for each in schema.arguments),
        writes=tuple(writes),
        returns=returns,
    )


def _argument(argument: int | str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(argument, int):
        return args[argument] if argument < len(args) else None
    return kwargs.get(argument) if argument is not None else None
