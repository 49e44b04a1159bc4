"""In-place operators become operators that make new tensors; only buffers are still updated, and which is on
record.

Values are followed by the memory they lie in. When memory is written, its owner gets a new value (through the
views between, see `views`), and every other view of it is made again from the new value when it is next used:
as eager's views see the write.

    y = clone(x);  v = y[:, 1];  v.fill_(0);  y.sum()
    y = clone(x);  v = y[:, 1];  v2 = fill(v, 0);  y2 = select_scatter(y, v2, 1, 1);  y2.sum()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshloom.core.errors import CaptureError
from meshloom.program.ir.callables import out_of_place
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.schemas import (
    arguments_of,
    functional,
    functional_of_out,
    is_list,
    is_part,
    name_of,
    running_statistics,
)
from meshloom.program.trace.block_calls import ENTER, LEAVE
from meshloom.program.trace.export import META, Exported, describe_place
from meshloom.program.trace.infer import Inferred, Shape, infer
from meshloom.program.trace.views import written

aten = torch.ops.aten

_DROPPED = ("_assert", "sym_constrain_range", "_guards")
_SHAPE_WRITES = {"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_"}
# Draw in place otherwise than out of place on some devices, so they run in place on a copy.
_RUN_ON_A_COPY = {
    "dropout_",
    "alpha_dropout_",
    "feature_dropout_",
    "feature_alpha_dropout_",
    "rrelu_",
    "rrelu_with_noise_",
}


@dataclass(frozen=True, kw_only=True)
class Pure:
    """A graph without in-place operators.

    updates: placeholder of a buffer -> the node whose value it is given at the end.
    in_place: placeholders of buffers that operators update as they run (running statistics of batch norm).
    inferred: what its nodes give, where that is known because nothing was written.
    """

    graph: fx.Graph
    updates: dict[str, fx.Node]
    in_place: frozenset[str]
    inferred: Inferred | None


def without_mutation(exported: Exported, likes: Mapping[str, Shape]) -> Pure:
    """The same computation in a new graph; placeholders keep their names. likes: placeholder -> what it will
    be."""
    return _Rewriter(exported, infer(_without_assertions(exported.graph), likes)).rewrite()


def _without_assertions(graph: fx.Graph) -> fx.Graph:
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and any(part in str(node.target) for part in _DROPPED)
            and not node.users
        ):
            graph.erase_node(node)
    return graph


class _Rewriter:
    """old: nodes of the exported graph; new: nodes of the pure one. A version counts the writes to a piece of
    memory."""

    def __init__(self, exported: Exported, inferred: Inferred) -> None:
        self.exported = exported
        self.inferred = inferred
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.made_at: dict[fx.Node, int] = {}
        self.versions: dict[int, int] = {}
        self.viewed: dict[fx.Node, fx.Node] = {}  # view -> what it is a view of
        self.same: dict[fx.Node, fx.Node] = {}  # result of an in-place operator -> its operand
        self.written_buffers: dict[fx.Node, None] = {}
        self.in_place: set[str] = set()
        self.graded: set[int | None] = set()  # memory into which something with a gradient was written
        self.written = False
        self.kept: set[fx.Node] = set()  # new nodes that do more than their result

    def rewrite(self) -> Pure:
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self._put(node, self._copy(node))
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self._read))
            elif (operand := self._operand(node)) is not None:
                self.written = True
                self._write(node, operand)
            else:
                self._call(node)
        updates = {node.name: self._read(node) for node in self.written_buffers}
        self._erase_unused(self.kept | set(updates.values()))
        return Pure(
            graph=self.graph,
            updates=updates,
            in_place=frozenset(self.in_place),
            inferred=None if self.written else self._carried(),
        )

    def _carried(self) -> Inferred:
        shapes = {self.new[node]: shapes for node, shapes in self.inferred.shapes.items() if node in self.new}
        return Inferred(
            shapes=shapes, draws={self.new[node]: count for node, count in self.inferred.draws.items()}
        )

    def _call(self, node: fx.Node) -> None:
        storage = self.inferred.storage(node)
        if storage is not None:
            viewed = next(
                (each for each in node.all_input_nodes if self.inferred.storage(each) == storage), None
            )
            if viewed is not None:
                self.viewed[node] = viewed
        for buffer in running_statistics(node):
            if buffer.op != "placeholder" or buffer.name not in self.exported.buffers:
                raise self._refusal(node, "updates running statistics that are no buffers of the model")
            if buffer not in self.written_buffers:
                self.in_place.add(buffer.name)
        self._put(node, self._copy(node))

    def _operand(self, node: fx.Node) -> fx.Node | None:
        """The tensor that a node writes, if it does."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return None
        found = [
            value
            for argument, value in arguments_of(node)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        tensors = [value for value in found if isinstance(value, fx.Node)]
        if (
            len(found) != 1
            or len(tensors) != 1
            or tensors[0] not in (node.args[0] if node.args else None, node.kwargs.get("out"))
        ):
            raise self._refusal(node, "writes to more than one tensor")
        return tensors[0]

    def _write(self, node: fx.Node, operand: fx.Node) -> None:
        owner = self._owner(operand)
        self._check(node, operand, owner)
        name = name_of(node)
        if name in _SHAPE_WRITES:
            self._change_shape(node, operand, name)
            return
        value = self._new_value(node, operand, name)
        self.same[node] = operand
        at = operand
        while at in self.viewed or at in self.same:
            if at in self.same:
                at = self.same[at]
                continue
            viewed = self.viewed[at]
            if is_list(viewed):  # split(x)[i]: on to x
                viewed = self.viewed[viewed]
            before = self._read(viewed)
            up = written(self.graph, at, before, self._shape(viewed), self._shape(at), value)
            if up is None:
                raise self._refusal(
                    node,
                    f"writes through {name_of(at) if at.op == 'call_function' else at} into another tensor",
                )
            if up is not value:
                up.meta = dict(node.meta)
            at, value = viewed, up
        storage = self.inferred.storage(at)
        assert storage is not None
        self.versions[storage] = self.versions.get(storage, 0) + 1
        if self._shape(node).requires_grad:
            self.graded.add(storage)
        self._put(at, value)
        if at.op == "placeholder" and at.name in self.exported.buffers:
            self.written_buffers[at] = None

    def _check(self, node: fx.Node, operand: fx.Node, owner: fx.Node) -> None:
        shape = self._shape(owner)
        if owner.op == "placeholder" and owner.name in self.exported.parameters:
            raise self._refusal(
                node, f"writes to parameter {self.exported.parameters[owner.name]} in the forward"
            )
        if owner.op == "placeholder" and owner.name in self.exported.constants:
            raise self._refusal(
                node,
                "writes to a tensor that is an attribute but no buffer (register it with register_buffer)",
            )
        hidden = not self._shape(operand).requires_grad and any(
            self._shape(each).requires_grad for each in self._trail(operand)
        )
        recorded = node.meta.get(META, {}).get("context")
        if name_of(node) != "detach_" and (
            (recorded and not recorded.grad and shape.requires_grad) or hidden
        ):
            raise self._refusal(node, "writes, without gradient, to a tensor that has one")

    def _new_value(self, node: fx.Node, operand: fx.Node, name: str) -> fx.Node:
        was = self._shape(operand)
        if "out" in node.kwargs:
            function = functional_of_out(node)
            if function is None or not self._gives(function, node, was):
                raise self._refusal(
                    node, "writes to out= what it would give otherwise in another shape or precision"
                )
            others = {key: value for key, value in node.kwargs.items() if key != "out"}
            return self._made(
                node, self.graph.call_function(function, *fx.map_arg((node.args, others), self._read))
            )
        first, rest = self._read(operand), fx.map_arg(node.args[1:], self._read)
        kwargs = fx.map_arg(node.kwargs, self._read)
        # Overwriting all of a tensor that has a gradient leaves it a gradient of zeros, which copying in
        # place gives, too.
        graded = was.requires_grad or self.inferred.storage(operand) in self.graded
        if name == "copy_" and isinstance(node.args[1], fx.Node) and (not graded or is_part(operand)):
            return self._copied(node, was, self._shape(node.args[1]), viewed=operand in self.viewed)
        if name == "zero_":
            return self._made(node, self.graph.call_function(aten.fill.Scalar, (first, 0)))
        function = functional(node)
        if function is not None and name not in _RUN_ON_A_COPY and self._gives(function, node, was):
            made = self.graph.call_function(function, (first, *rest), kwargs)
        else:
            operator: Any = node.target
            made = self.graph.call_function(out_of_place, (operator, first, *rest), kwargs)
        return self._made(node, made)

    def _copied(self, node: fx.Node, was: Shape, source: Shape, *, viewed: bool) -> fx.Node:
        """The source of a `copy_`, with the dtype and shape of what it is copied to; a tensor of its own
        unless it is written into another."""
        made = self._read(node.args[1])  # type: ignore[arg-type]  # a node: the caller looked
        steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        if source.dtype != was.dtype or source.device != was.device:
            steps.append((aten.to.device, (was.device, was.dtype), {}))
        if source.shape != was.shape:
            steps.append((aten.expand.default, (list(was.shape),), {}))
        if not viewed:
            steps.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
        for function, args, kwargs in steps:
            made = self.graph.call_function(function, (made, *args), kwargs)
            made.meta = dict(node.meta)
        return made

    def _gives(self, function: Any, node: fx.Node, was: Shape) -> bool:
        """Whether the out-of-place operator gives the dtype and shape that the in-place one keeps."""
        probe = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        likes: dict[str, Shape] = {}
        for each in node.all_input_nodes:
            shapes = self.inferred.shapes[each]
            if len(shapes) != 1:
                return False
            made[each] = probe.placeholder(each.name)
            likes[made[each].name] = shapes[0]
        kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        call = probe.call_function(function, *fx.map_arg((node.args, kwargs), made.__getitem__))
        call.meta = dict(node.meta)
        shape = infer(probe, likes).shapes[call]
        return len(shape) == 1 and shape[0].dtype == was.dtype and shape[0].shape == was.shape

    def _change_shape(self, node: fx.Node, operand: fx.Node, name: str) -> None:
        function = functional(node)
        if (
            function is None
            or operand in self.viewed
            or any(operand in (each, self.same.get(each)) for each in self.viewed.values())
        ):
            raise self._refusal(node, "changes the shape of a tensor that is a view, or has one")
        made = self.graph.call_function(function, (self._read(operand), *node.args[1:]), node.kwargs)
        made.meta = dict(node.meta)
        self._put(operand, made)
        self._put(node, made)

    def _read(self, node: fx.Node) -> fx.Node:
        """The new node that has the old one's value now."""
        while node in self.same:
            node = self.same[node]
        storage = self.inferred.storage(node)
        if (
            storage is not None
            and node in self.viewed
            and self.made_at[node] != self.versions.get(storage, 0)
        ):
            self._put(node, self._copy(node))
        return self.new[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        return self._made(node, self.graph.node_copy(node, self._read))

    def _made(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """`made` in place of the old `node`. What draws stays even if nobody looks: the draws behind it are
        counted from there."""
        made.meta = dict(node.meta)
        if (
            node in self.inferred.draws
            or node.target in (ENTER, LEAVE)
            or any(True for _ in running_statistics(node))
        ):
            self.kept.add(made)
        return made

    def _put(self, node: fx.Node, value: fx.Node) -> None:
        self.new[node] = value
        storage = self.inferred.storage(node)
        self.made_at[node] = self.versions.get(storage, 0) if storage is not None else 0

    def _owner(self, node: fx.Node) -> fx.Node:
        return list(self._trail(node))[-1]

    def _trail(self, node: fx.Node) -> Sequence[fx.Node]:
        """A view, what it is a view of, and so on to the owner of the memory."""
        trail = [node]
        while (before := self.same.get(trail[-1]) or self.viewed.get(trail[-1])) is not None:
            if not is_list(before):
                trail.append(before)
            else:
                trail.append(self.viewed[before])
        return trail

    def _shape(self, node: fx.Node) -> Shape:
        return self.inferred.shapes[node][0]

    def _erase_unused(self, kept: set[fx.Node]) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and node not in kept:
                self.graph.erase_node(node)

    def _refusal(self, node: fx.Node, what: str) -> CaptureError:
        return CaptureError(
            f"{name_of(node)} at {describe_place(node)} {what}, which a program cannot hold. Write it out of place. {WAY_OUT}"
        )
