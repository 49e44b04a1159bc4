"""Replaces in-place operators by operators that return new tensors, and records updates of buffers.

Values are tracked by the memory they lie in. After a write, the owner of the memory gets a new value (through
the views in between, see `views`), and every other view of it is recomputed from the new value at its next
use, just as eager's views see the write.

    y = clone(x);  v = y[:, 1];  v.fill_(0);  y.sum()
    y = clone(x);  v = y[:, 1];  v2 = fill(v, 0);  y2 = select_scatter(y, v2, 1, 1);  y2.sum()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from meshloom.core.errors import CaptureError
from meshloom.program.ir.callables import out_of_place
from meshloom.program.ir.contexts import Context
from meshloom.program.ir.lines import WAYS_OUT
from meshloom.program.ir.schemas import (
    arguments_of,
    functional,
    functional_of_out,
    is_list,
    is_part,
    is_written,
    name_of,
    running_statistics,
)
from meshloom.program.opaque.call import OpaqueCall
from meshloom.program.opaque.operator import OPAQUE
from meshloom.program.trace.block_calls import ENTER, LEAVE
from meshloom.program.trace.export import META, Exported, describe_place, path_of
from meshloom.program.trace.infer import Inferred, Shape, infer
from meshloom.program.trace.views import written

aten = torch.ops.aten

_DROPPED = ("_assert", "sym_constrain_range", "_guards")
_SHAPE_WRITES = {"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_"}
# On some devices these draw other numbers in place than out of place, so they run in place on a copy.
_DROPOUTS = {"dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"}
_RUN_ON_A_COPY = {*_DROPOUTS, "rrelu_", "rrelu_with_noise_"}


@dataclass(frozen=True, kw_only=True)
class Pure:
    """A graph without in-place operators.

    updates: placeholder of a buffer, or of a parameter that is not trained -> the node with its new value at the end.
    in_place: placeholders of those that operators update while they run (running statistics of batch norm).
    inferred: shapes of its nodes, known where nothing was written.
    """

    graph: fx.Graph
    updates: dict[str, fx.Node]
    in_place: frozenset[str]
    inferred: Inferred | None


def without_mutation(exported: Exported, likes: Mapping[str, Shape]) -> Pure:
    """The same computation in a new graph with the same placeholders. likes: shapes of these."""
    for node in reversed(list(exported.graph.nodes)):
        assertion = node.op == "call_function" and any(part in str(node.target) for part in _DROPPED)
        if assertion and not node.users:
            exported.graph.erase_node(node)
    _change_shapes_out_of_place(exported)
    return _Rewriter(exported, infer(exported.graph, likes)).rewrite()


class _Rewriter:
    """Copies a graph node by node without its writes. A version counts the writes to a piece of memory."""

    def __init__(self, exported: Exported, inferred: Inferred) -> None:
        self.exported = exported
        self.inferred = inferred
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}  # exported node -> node of the new graph
        self.version_of: dict[fx.Node, int] = {}  # the version in which a node was copied
        self.versions: dict[int, int] = {}
        self.view_of: dict[fx.Node, fx.Node] = {}
        self.operand_of: dict[fx.Node, fx.Node] = {}  # result of an in-place operator -> its operand
        self.written_buffers: dict[fx.Node, None] = {}
        self.in_place: set[str] = set()
        self.with_gradient: set[int | None] = set()  # memory into which something with a gradient was written
        self.written = False
        self.with_effects: set[fx.Node] = set()  # new nodes with an effect besides their result

    def rewrite(self) -> Pure:
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self._put(node, self._copy(node))
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self._read))
            elif (operand := _written_operand(node)) is not None:
                self.written = True
                self._write(node, operand)
            else:
                self._call(node)
        updates = {node.name: self._read(node) for node in self.written_buffers}
        needed = self.with_effects.union(updates.values())
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and node not in needed:
                self.graph.erase_node(node)
        inferred = None if self.written else self._inferred_of_copies()
        return Pure(graph=self.graph, updates=updates, in_place=frozenset(self.in_place), inferred=inferred)

    def _inferred_of_copies(self) -> Inferred:
        shapes = {self.new[node]: shapes for node, shapes in self.inferred.shapes.items() if node in self.new}
        draws = {self.new[node]: count for node, count in self.inferred.draws.items()}
        return Inferred(shapes=shapes, draws=draws)

    def _call(self, node: fx.Node) -> None:
        storage = self.inferred.storage(node)
        if storage is not None:
            inputs = node.all_input_nodes
            viewed = next((each for each in inputs if self.inferred.storage(each) == storage), None)
            is_new = viewed is not None and is_list(viewed) and viewed not in self.view_of  # an opaque part's
            if viewed is not None and not is_new:
                self.view_of[node] = viewed
        for buffer in (*running_statistics(node), *_written_by_opaque(node)):
            if not self._is_written_as_buffer(buffer):
                raise _refusal(node, "updates running statistics that are not buffers of the model")
            if buffer not in self.written_buffers:
                self.in_place.add(buffer.name)
        self._put(node, self._copy(node))

    def _write(self, node: fx.Node, operand: fx.Node) -> None:
        self._check(node, operand)
        before, value = self._read(operand), self._new_value(node, operand, name_of(node))
        context = node.meta.get(META, {}).get("context")
        hidden = bool(context and not context.grad)  # from autograd
        self.operand_of[node] = operand
        at = operand
        while at in self.view_of or at in self.operand_of:
            if at in self.operand_of:
                at = self.operand_of[at]
                continue
            viewed = self.view_of[at]
            if is_list(viewed):  # split(x)[i]: on to x
                viewed = self.view_of[viewed]
            before = self._read(viewed)
            up = written(self.graph, at, before, self._shape(viewed), self._shape(at), value)
            if up is None:
                through = name_of(at) if at.op == "call_function" else at
                raise _refusal(node, f"writes through {through} into another tensor")
            if up is not value:
                up.meta = dict(node.meta)
            detached = self._shape(viewed).requires_grad and not self._shape(at).requires_grad
            if detached and not hidden:
                up = self._with_gradient_of(before, up, node)
            at, value = viewed, up
        if hidden and self._shape(at).requires_grad:
            value = self._with_gradient_of(before, value, node)
        storage = self.inferred.storage(at)
        assert storage is not None
        self.versions[storage] = self.versions.get(storage, 0) + 1
        if self._shape(node).requires_grad:
            self.with_gradient.add(storage)
        self._put(at, value)
        if self._is_written_as_buffer(at):
            self.written_buffers[at] = None

    def _check(self, node: fx.Node, operand: fx.Node) -> None:
        views = self._views_down_from(operand)
        owner = views[-1]
        if (
            owner.op == "placeholder"
            and owner.name in self.exported.parameters
            and self._shape(owner).requires_grad
        ):
            name = self.exported.parameters[owner.name]
            raise _refusal(node, f"writes to parameter {name} in the forward, which is trained")
        if owner.op == "placeholder" and owner.name in self.exported.constants:
            unregistered = "a tensor that is an attribute but not a buffer (register it with register_buffer)"
            raise _refusal(node, f"writes to {unregistered}")

    def _with_gradient_of(self, before: fx.Node, value: fx.Node, node: fx.Node) -> fx.Node:
        """A value that was written where autograd does not see it: its gradient goes to what was there before."""
        change = self.graph.call_function(aten.sub.Tensor, (value, before))
        result = self.graph.call_function(aten.add.Tensor, (before, change))
        for new, grad in ((change, False), (result, True)):
            new.meta = _in_context(node, grad=grad)
        return result

    def _new_value(self, node: fx.Node, operand: fx.Node, name: str) -> fx.Node:
        """What `operand` holds after the write, as a new tensor."""
        was = self._shape(operand)
        if "out" in node.kwargs:
            function = functional_of_out(node)
            if function is None or not _keeps_shape(function, node, was, self.inferred):
                raise _refusal(node, "writes to an out= of another shape or dtype than its result has")
            others = {key: value for key, value in node.kwargs.items() if key != "out"}
            args = fx.map_arg((node.args, others), self._read)
            return self._replacing(node, self.graph.call_function(function, *args))
        first, rest = self._read(operand), fx.map_arg(node.args[1:], self._read)
        kwargs = fx.map_arg(node.kwargs, self._read)
        # Overwriting all of a tensor that has a gradient gives it a gradient of zeros, which an in-place copy
        # does, too.
        graded = was.requires_grad or self.inferred.storage(operand) in self.with_gradient
        if name == "copy_" and isinstance(node.args[1], fx.Node) and (not graded or is_part(operand)):
            source, shape = self._read(node.args[1]), self._shape(node.args[1])
            return _converted(source, shape, was, node.meta, clone=operand not in self.view_of)
        if name == "zero_":
            return self._replacing(node, self.graph.call_function(aten.fill.Scalar, (first, 0)))
        function: Any = functional(node)
        args: Any = first, *rest
        if function is None or name in _RUN_ON_A_COPY or not _keeps_shape(function, node, was, self.inferred):
            function, args = out_of_place, (node.target, *args)
        return self._replacing(node, self.graph.call_function(function, args, kwargs))

    def _read(self, node: fx.Node) -> fx.Node:
        """The new node with the current value of an old one."""
        while node in self.operand_of:
            node = self.operand_of[node]
        storage = self.inferred.storage(node)
        version = self.versions.get(storage, 0) if storage is not None else 0
        if node in self.view_of and self.version_of[node] != version:
            self._put(node, self._copy(node))
        return self.new[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        return self._replacing(node, self.graph.node_copy(node, self._read))

    def _replacing(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """`new` for the old `node`. Unused draws stay, too: later draws are numbered after them."""
        new.meta = dict(node.meta)
        effect = node in self.inferred.draws or node.target in (ENTER, LEAVE, OPAQUE)
        if effect or any(True for _ in running_statistics(node)):
            self.with_effects.add(new)
        return new

    def _put(self, node: fx.Node, value: fx.Node) -> None:
        self.new[node] = value
        storage = self.inferred.storage(node)
        self.version_of[node] = self.versions.get(storage, 0) if storage is not None else 0

    def _views_down_from(self, node: fx.Node) -> list[fx.Node]:
        """A view, what it is a view of, and so on to the owner of the memory."""
        views = [node]
        while (before := self.operand_of.get(views[-1]) or self.view_of.get(views[-1])) is not None:
            views.append(self.view_of[before] if is_list(before) else before)
        return views

    def _is_written_as_buffer(self, node: fx.Node) -> bool:
        """Whether it is a buffer, or a parameter that is not trained: a step may write them."""
        if node.op != "placeholder":
            return False
        frozen = node.name in self.exported.parameters and not self._shape(node).requires_grad
        return frozen or node.name in self.exported.buffers

    def _shape(self, node: fx.Node) -> Shape:
        return self.inferred.shapes[node][0]


def _in_context(node: fx.Node, *, grad: bool) -> dict[str, Any]:
    known = node.meta.get(META, {})
    return {**node.meta, META: {**known, "context": replace(known.get("context") or Context(), grad=grad)}}


def _change_shapes_out_of_place(exported: Exported) -> None:
    """Turns operators that change a tensor's shape in place into views, which all later nodes use instead."""
    for node in exported.graph.nodes:
        if node.op != "call_function" or name_of(node) not in _SHAPE_WRITES:
            continue
        function, operand = functional(node), node.args[0]
        if function is None or (operand.op == "placeholder" and operand.name not in exported.inputs):
            raise _refusal(node, "changes in place a tensor that the model keeps")
        node.target = function
        for user in list(operand.users):
            if node < user:
                user.replace_input_with(operand, node)


def _written_by_opaque(node: fx.Node) -> Iterator[Any]:
    """Buffers that an opaque module writes."""
    if node.target is OPAQUE:
        call: Any = node.args[3]
        state: Any = node.args[1]
        yield from (state[number] for number in OpaqueCall.of(call).written)


def _written_operand(node: fx.Node) -> fx.Node | None:
    """The tensor that a node writes to, if any."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    arguments = arguments_of(node.target, node.args, node.kwargs)
    operands = [value for argument, value in arguments if is_written(argument)]
    places = (node.args[0] if node.args else None, node.kwargs.get("out"))
    if len(operands) != 1 or not isinstance(operands[0], fx.Node) or operands[0] not in places:
        raise _refusal(node, "writes to more than one tensor")
    return operands[0]


def _converted(source: fx.Node, shape: Shape, wanted: Shape, meta: dict[str, Any], *, clone: bool) -> fx.Node:
    """The source of a `copy_` with the destination's dtype, device and shape. clone: as its own tensor."""
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    if shape.dtype != wanted.dtype or shape.device != wanted.device:
        steps.append((aten.to.device, (wanted.device, wanted.dtype), {}))
    if shape.shape != wanted.shape:
        steps.append((aten.expand.default, (list(wanted.shape),), {}))
    if clone:
        steps.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
    for function, args, kwargs in steps:
        source = source.graph.call_function(function, (source, *args), kwargs)
        source.meta = dict(meta)
    return source


def _keeps_shape(function: Any, node: fx.Node, before: Shape, inferred: Inferred) -> bool:
    """Whether the out-of-place operator returns the dtype and shape that the in-place one leaves."""
    probe = fx.Graph()
    placeholders: dict[fx.Node, fx.Node] = {}
    likes: dict[str, Shape] = {}
    for each in node.all_input_nodes:
        shapes = inferred.shapes[each]
        if len(shapes) != 1:
            return False
        placeholders[each] = probe.placeholder(each.name)
        likes[placeholders[each].name] = shapes[0]
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    call = probe.call_function(function, *fx.map_arg((node.args, kwargs), placeholders.__getitem__))
    call.meta = dict(node.meta)
    result = infer(probe, likes).shapes[call]
    return len(result) == 1 and result[0].dtype == before.dtype and result[0].shape == before.shape


def _refusal(node: fx.Node, what: str) -> CaptureError:
    return CaptureError(
        f"{name_of(node)} at {describe_place(node)} {what}, which a program cannot represent. Write it out of place. {WAYS_OUT}"
    ).at(path_of(node))
