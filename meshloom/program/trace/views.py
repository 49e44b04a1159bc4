"""Scatters writes to views back: the new value of a tensor after a write to a view of it.

For a view `v = op(x)` and a new value of v, `written` adds the nodes that compute the new value of x.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from meshloom.program.ir.schemas import arguments_of
from meshloom.program.trace.infer import Shape

aten = torch.ops.aten

_SQUEEZES = {"unsqueeze", "squeeze", "expand", "expand_as"}
_RESHAPES = {"view", "_unsafe_view", "view_as", "reshape", "reshape_as", "ravel", "flatten", "unflatten"}
_SWAPS = {"t", "transpose", "numpy_T", "mT", "matrix_H", "swapaxes", "swapdims", "mH"}
_SPLITS = {"split", "chunk", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit"}


def written(
    graph: fx.Graph, view: fx.Node, source: fx.Node, of: Shape, was: Shape, new: fx.Node
) -> fx.Node | None:
    """New value of the tensor that `view` is a view of; None if it is not supported.

    view: the node that created the view. source: the viewed tensor before, in `graph`.
    of: the viewed tensor. was: the view. new: the view's new value, in `graph`.
    """
    if (was.shape, was.stride, was.offset, was.dtype) == (of.shape, of.stride, of.offset, of.dtype):
        return new
    call = graph.call_function
    if view.target is operator.getitem:
        return _written_part(graph, view, source, of, was, new)
    target: Any = view.target
    name = target._schema.name.removeprefix("aten::")
    args = _arguments(view)
    if was.dtype != of.dtype:
        if name == "view_as_real":
            return call(aten.view_as_complex.default, (new,))
        return call(aten.view_as_real.default, (new,)) if name == "view_as_complex" else None
    if name in _SWAPS:
        if name in ("transpose", "swapaxes", "swapdims"):
            return call(aten.transpose.int, (new, *view.args[1:3]))
        dims = list(range(len(was.shape)))
        swapped = dims[::-1] if name in ("t", "numpy_T") else [*dims[:-2], dims[-1], dims[-2]]
        return call(aten.permute.default, (new, swapped))
    if name == "permute":
        dims = [dim % len(of.shape) for dim in args["dims"]]
        return call(aten.permute.default, (new, [dims.index(dim) for dim in range(len(dims))]))
    if name == "movedim":
        return call(target, (new, args["destination"], args["source"]))
    if name in ("slice", "narrow"):
        dim = args["dim"] % len(of.shape)
        step = args.get("step", 1) if name == "slice" else 1
        start = (was.offset - of.offset) // of.stride[dim] if of.stride[dim] else 0
        return _scatter(graph, source, new, dim, start, was.shape[dim], step)
    if name == "select":
        return call(aten.select_scatter.default, (source, new, args["dim"], args["index"]))
    if name == "diagonal":
        diagonal = args.get("offset", 0), args.get("dim1", 0), args.get("dim2", 1)
        return call(aten.diagonal_scatter.default, (source, new, *diagonal))
    if name in _RESHAPES | _SQUEEZES and math.prod(was.shape) == math.prod(of.shape):
        return call(aten.reshape.default, (new, list(of.shape)))
    return None


def _written_part(
    graph: fx.Graph, view: fx.Node, source: fx.Node, of: Shape, was: Shape, new: fx.Node
) -> fx.Node | None:
    """The same for `split(x)[number]` and `unbind(x)[number]`, where `source` is x."""
    split: Any = view.args[0]
    name = split.target._schema.name.removeprefix("aten::")
    dim: int = _arguments(split).get("dim", 0) % len(of.shape)
    if name == "unbind":
        return graph.call_function(aten.select_scatter.default, (source, new, dim, view.args[1]))
    if name in _SPLITS and of.stride[dim]:
        if name in ("hsplit", "vsplit", "dsplit"):
            dim = {"hsplit": min(1, len(of.shape) - 1), "vsplit": 0, "dsplit": 2}[name]
        start = (was.offset - of.offset) // of.stride[dim]
        return _scatter(graph, source, new, dim, start, was.shape[dim], 1)
    return None


def _scatter(
    graph: fx.Graph, source: fx.Node, new: fx.Node, dim: int, start: int, count: int, step: int
) -> fx.Node:
    end = start + (count - 1) * step + 1
    return graph.call_function(aten.slice_scatter.default, (source, new, dim, start, end, step))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, defaults filled in."""
    target: Any = node.target
    arguments = target._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given = {each.name: value for each, value in arguments_of(target, node.args, node.kwargs)}
    return {**defaults, **given}
