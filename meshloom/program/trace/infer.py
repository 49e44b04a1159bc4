"""Infers the results of every node by running a graph on fake tensors: shapes, dtypes, strides, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.program.ir.contexts import Context, Entered
from meshloom.program.ir.draws import CountDraws
from meshloom.program.ir.lines import WAY_OUT, WAYS_OUT
from meshloom.program.ir.sparse_constants import empty_like, is_sparse, memory_of, offset_of, strides_of
from meshloom.program.opaque.call import OpaqueCall
from meshloom.program.opaque.operator import OPAQUE
from meshloom.program.trace.block_calls import LEAVE, REPEAT, REPEAT_SEVERAL, layouts_of
from meshloom.program.trace.export import context_of, describe_place, path_of
from meshloom.program.trace.on_cpu import AsOnCPU, fake_mode


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tensor without its values.

    storage: equal for tensors that share memory. offset: of its first element in that memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int
    storage: int
    requires_grad: bool
    device: torch.device
    sparse: Tensor | None = None  # a constant that is a sparse matrix


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """shapes: node -> its tensors, in order (none for numbers). draws: node -> its random ATen calls."""

    shapes: dict[fx.Node, tuple[Shape, ...]]
    draws: dict[fx.Node, int]

    def storage(self, node: fx.Node) -> int | None:
        """Memory shared by all of a node's tensors; None for numbers and for tensors in different memory."""
        found = {shape.storage for shape in self.shapes.get(node, ())}
        return found.pop() if len(found) == 1 else None


def infer(graph: fx.Graph, likes: Mapping[str, Shape]) -> Inferred:
    """Run `graph` without values. likes: placeholder -> its shape."""
    contexts = tuple(dict.fromkeys(context_of(node) for node in graph.nodes))
    shapes: dict[fx.Node, tuple[Shape, ...]] = {}
    draws: dict[fx.Node, int] = {}
    values: dict[fx.Node, Any] = {}  # all until the end, so that no memory is reused
    repeated: dict[int, Any] = {}  # call -> its results
    fake = fake_mode()
    counter = CountDraws()
    with torch.enable_grad(), Entered((*contexts, Context())) as entered, fake, AsOnCPU(), counter:
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = _tensor_of(likes[node.name])
            elif node.op == "call_function":
                entered.move_to(contexts.index(context_of(node)))
                before = counter.count
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values[each])
                if node.target is LEAVE:
                    repeated[args[1]] = args[0]
                elif node.target in (REPEAT, REPEAT_SEVERAL):
                    args = (*args[:4], *layouts_of(repeated[args[2]]))
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise CaptureError(
                        f"{node.target} at {describe_place(node)} could not run without values: {str(error).splitlines()[0]}. {WAYS_OUT}"
                    ).at(path_of(node)) from error
                if node.target is OPAQUE:
                    counter.count += OpaqueCall.of(args[3]).num_draws
                if counter.count > before:
                    draws[node] = counter.count - before
            tensors = [leaf for leaf in tree_leaves(values.get(node)) if isinstance(leaf, Tensor)]
            if not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
                raise CaptureError(
                    f"The shape of the result of {node.target} at {describe_place(node)} depends on the values in the batch, "
                    f"so no one program computes it. Keep the shape, with torch.where or a mask. {WAYS_OUT}"
                ).at(path_of(node))
            if node.op == "call_function" and any(each.layout != torch.strided for each in tensors):
                raise CaptureError(
                    f"The result of {node.target} at {describe_place(node)} is a sparse tensor, and in a program only constants are sparse. "
                    f"Create it once, outside of the forward, and keep it as a plain attribute. {WAY_OUT}"
                ).at(path_of(node))
            shapes[node] = tuple(map(shape_of, tensors))
    return Inferred(shapes=shapes, draws=draws)


def _tensor_of(shape: Shape) -> Tensor:
    if shape.sparse is not None:
        return empty_like(shape.sparse, shape.device)
    like = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=shape.device)
    return like.requires_grad_(shape.requires_grad)


def shape_of(tensor: Tensor) -> Shape:
    """The `Shape` of a tensor."""
    return Shape(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        stride=strides_of(tensor),
        offset=offset_of(tensor),
        storage=memory_of(tensor),
        requires_grad=tensor.requires_grad,
        device=tensor.device,
        sparse=tensor if is_sparse(tensor) else None,
    )
