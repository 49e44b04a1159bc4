"""Operators that stand for calls of modules during an export (`folding.py`); `unfold.py` removes them.

enter(inputs, state, 3, path)               call 3 begins, with its tensors and its module's parameters and buffers
leave(results, 3)                           call 3 ends
y = repeat(inputs, state, 3, path, ...)     a call of another module, identical to call 3, not traced
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from meshloom.core.errors import CaptureError
from meshloom.program.ir.nodes import Node


@dataclass(frozen=True, kw_only=True)
class Shortcuts:
    """What an export leaves out, as the program is the same without it; if it is not, it is exported anew.

    fold: identical calls of modules are exported once (`folding.py`).
    no_cache: models of transformers fill no cache of keys and values (`config.use_cache`), which is for
        generating text: it makes each layer's call one of its own.
    """

    fold: bool = True
    no_cache: bool = True


# In the order in which they are tried.
SHORTCUTS = (Shortcuts(), Shortcuts(fold=False), Shortcuts(fold=False, no_cache=False))


class ShortcutError(CaptureError):
    """A shortcut may have made the export another one: the loss must be exported with fewer of them."""


# dtypes by name: torch before 2.13 hands numbers in place of a ScalarType[] to operators written in Python
_AS = "str path, int[] ranks, int[] sizes, int[] strides, str[] dtypes"

_library = torch.library.Library("meshloom", "DEF")
_library.define("enter(Tensor[] inputs, Tensor[] state, int call, str path) -> ()")
_library.define("leave(Tensor[] results, int call) -> ()")
_library.define(f"repeat(Tensor[] inputs, Tensor[] state, int call, {_AS}) -> Tensor")
_library.define(f"repeat_several(Tensor[] inputs, Tensor[] state, int call, {_AS}) -> Tensor[]")

_ops: Any = torch.ops
ENTER, LEAVE = _ops.meshloom.enter.default, _ops.meshloom.leave.default
REPEAT, REPEAT_SEVERAL = _ops.meshloom.repeat.default, _ops.meshloom.repeat_several.default


def path_of_call(node: Node) -> str:
    """The module called in an `enter` or `repeat` node; the node's own path if only the module's forward was
    called, which torch does not record."""
    path: str = node.args[3]
    return node.path if node.path.rpartition(".")[2] == path.rpartition(".")[2] else path


def layouts_of(results: Sequence[Tensor]) -> tuple[list[int], list[int], list[int], list[str]]:
    """The arguments of `repeat` that describe its results: the shapes, strides and names of dtypes of these."""
    return (
        [each.ndim for each in results],
        [size for each in results for size in each.shape],
        [stride for each in results for stride in each.stride()],
        [str(each.dtype).removeprefix("torch.") for each in results],
    )


def _nothing(*args: Any) -> None:
    return None


def _results(inputs: Any, state: Any, call: int, path: str, *layouts: Any) -> list[Tensor]:
    ranks, sizes, strides, dtypes = layouts
    device = (*inputs, *state)[0].device
    results: list[Tensor] = []
    at = 0
    for rank, name in zip(ranks, dtypes, strict=True):
        shape, stride = sizes[at : at + rank], strides[at : at + rank]
        results.append(torch.empty_strided(shape, stride, dtype=getattr(torch, name), device=device))
        at += rank
    return results


def _result(*args: Any) -> Tensor:
    (result,) = _results(*args)
    return result


_bodies = {"enter": _nothing, "leave": _nothing, "repeat": _result, "repeat_several": _results}
for _name, _body in _bodies.items():
    torch.library.register_fake(f"meshloom::{_name}", _body, lib=_library)
for _operator in (ENTER, LEAVE):
    has_side_effect(_operator)
