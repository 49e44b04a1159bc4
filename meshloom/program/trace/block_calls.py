"""Operators that stand in a graph for calls of modules, while a loss is being read (`folding.py`); no program
is left with them (`unfold.py`).

enter(given, state, 3, path)       here begins what call 3 computes, of the tensors it was given and of its module's parameters and buffers
...
leave(made, 3)                     here it ends
y = alike(given, state, 3, path, ...)    a call of another module that is like call 3, and was not read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from meshloom.core.errors import CaptureError
from meshloom.program.ir.nodes import Node


class NotAlikeError(CaptureError):
    """Calls were taken for alike, and what was read does not bear it out: the loss is to be read as it is."""


_AS = "str path, int[] ranks, int[] sizes, int[] strides, ScalarType[] dtypes"

_library = torch.library.Library("meshloom", "DEF")
_library.define("enter(Tensor[] given, Tensor[] state, int call, str path) -> ()")
_library.define("leave(Tensor[] made, int call) -> ()")
_library.define(f"alike(Tensor[] given, Tensor[] state, int call, {_AS}) -> Tensor")
_library.define(f"alike_several(Tensor[] given, Tensor[] state, int call, {_AS}) -> Tensor[]")

_ops: Any = torch.ops
ENTER, LEAVE = _ops.meshloom.enter.default, _ops.meshloom.leave.default
ALIKE, ALIKE_SEVERAL = _ops.meshloom.alike.default, _ops.meshloom.alike_several.default
STAND_INS = frozenset({ENTER, LEAVE, ALIKE, ALIKE_SEVERAL})


def path_of_call(node: Node) -> str:
    """Of `enter` or `alike`: the module that is called. Its own place where only its forward was called,
    around which torch notes nothing."""
    path: str = node.args[3]
    return node.path if node.path.rpartition(".")[2] == path.rpartition(".")[2] else path


def like(made: Sequence[Tensor]) -> tuple[list[int], list[int], list[int], list[torch.dtype]]:
    """The arguments of `alike` that say what it gives: tensors as these."""
    sizes = [size for each in made for size in each.shape]
    return (
        [each.ndim for each in made],
        sizes,
        [stride for each in made for stride in each.stride()],
        [each.dtype for each in made],
    )


def _nothing(*args: Any) -> None:
    return None


def _made(
    given: Sequence[Tensor],
    state: Sequence[Tensor],
    call: int,
    path: str,
    ranks: Any,
    sizes: Any,
    strides: Any,
    dtypes: Any,
) -> list[Tensor]:
    made: list[Tensor] = []
    at = 0
    for rank, dtype in zip(ranks, dtypes, strict=True):
        made.append(
            torch.empty_strided(
                sizes[at : at + rank], strides[at : at + rank], dtype=dtype, device=(*given, *state)[0].device
            )
        )
        at += rank
    return made


def _made_one(*args: Any) -> Tensor:
    (made,) = _made(*args)
    return made


for _name, _body in (
    ("enter", _nothing),
    ("leave", _nothing),
    ("alike", _made_one),
    ("alike_several", _made),
):
    torch.library.register_fake(f"meshloom::{_name}", _body, lib=_library)
for _operator in (ENTER, LEAVE):
    has_side_effect(_operator)
