"""The axes of every value of a program, and the factor map of every node over them."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from meshloom.program.ir.nodes import Meta, Node, Ref, lists_in
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import is_sparse, strides_of
from meshloom.tensor_parallel.layout.axes import Axis, concatenation, fits, product
from meshloom.tensor_parallel.layout.routes import MappedNode, Route, routes_of
from meshloom.tensor_parallel.layout.unify import add_boundaries, freeze_axes, unify
from meshloom.tensor_parallel.rules.factors import Concat, Dims, Factors, Product, Term, labels_in
from meshloom.tensor_parallel.rules.operator_call import call_of
from meshloom.tensor_parallel.rules.table import Rules, factors_of

Axes = tuple[Axis, ...]  # one per dim


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The axes of a program. values: value -> the axes of each of its tensors. mapped: node name -> its
    factor map, if it has a rule."""

    program: Program
    values: Mapping[str, tuple[Axes, ...]]
    metas: Mapping[str, tuple[Meta, ...]]
    mapped: Mapping[str, MappedNode]
    routes: tuple[Route, ...] = ()

    @cached_property
    def order(self) -> Mapping[str, int]:
        """Node name -> its position in the program."""
        return {node.name: place for place, node in enumerate(self.program.nodes)}

    @cached_property
    def lists(self) -> frozenset[str]:
        """Values that are lists of tensors, and sparse ones. They are never resharded."""
        return lists_in(self.program.nodes) | {
            name for name, each in self.program.constants.items() if is_sparse(each)
        }


def layout_of(program: Program, rules: Rules) -> Layout:
    """The layout of a program: dims that an operator pairs set_parts one axis.

    A matrix whose rows and columns turn out to be the same axis (in x + W x, or in a state that W updates)
    could not be sharded at all: the same shard of rows and columns does not cover it. Then the layout is
    inferred again, with its columns as a separate axis.
    """
    layout = _inferred(program, rules, {})
    square = dict(_square_matrices(layout))
    return _inferred(program, rules, square) if square else layout


def _inferred(program: Program, rules: Rules, square: Mapping[str, int]) -> Layout:
    """The layout with separate columns for some matrices. square: node -> the operand that is such a
    matrix."""
    metas = metas_of(program)
    computed = {node.name for node in program.nodes}
    values = {
        name: tuple(_new_axes(each.shape) for each in found)
        for name, found in metas.items()
        if name not in computed
    }
    mapped: dict[str, MappedNode] = {}
    known: dict[Hashable, Factors | None] = {}
    for node in program.nodes:
        if node.target is operator.getitem:
            source: Ref = node.args[0]
            values[node.name] = (values[source.name][node.args[1]],)
            continue
        factors = _factors(node, metas, rules, known)
        if factors is None:
            values[node.name] = tuple(_new_axes(output.shape) for output in node.outputs)
            continue
        factors = _with_own_columns(factors, square[node.name]) if node.name in square else factors
        operands = [values[ref.name][0] for ref in node.operands()]
        own = mapped[node.name] = _map(node, factors, operands)
        values[node.name] = tuple(
            axes_of(dims, own.labels, output.shape)
            for dims, output in zip(factors.outputs, node.outputs, strict=True)
        )
    routes = routes_of(program, mapped)
    layout = Layout(program=program, values=values, metas=metas, mapped=mapped, routes=routes)
    freeze_axes(axes_in(layout))
    return layout


def _factors(
    node: Node, metas: Mapping[str, tuple[Meta, ...]], rules: Rules, known: dict[Hashable, Factors | None]
) -> Factors | None:
    """The factor map of a node, or None if there is no rule; cached for nodes with equal arguments and
    shapes."""
    operands = tuple(metas[ref.name] for ref in node.operands())
    constants = _constants((node.args, *node.kwargs.items()))
    key = node.target, constants, operands, node.outputs, bool(node.context.autocast), node.num_draws
    try:
        if key in known:
            return known[key]
    except TypeError:  # an unhashable argument
        key = node.name
    call = call_of(node, metas)
    known[key] = factors_of(call, rules) if call is not None else None
    return known[key]


def _constants(value: Any) -> Any:
    """A node's arguments without the names of values; distinguishes 1 from 1.0."""
    if isinstance(value, Ref):
        return Ref
    return tuple(map(_constants, value)) if isinstance(value, tuple) else (type(value), value)


def _square_matrices(layout: Layout) -> Iterator[tuple[str, int]]:
    """Nodes with a parameter, or a view of one, of which a summed axis is also a kept one, with its operand
    number."""
    held = {each.value for each in layout.program.parameters.values()}
    for name, mapped in layout.mapped.items():
        operands = [ref.name for ref in mapped.node.operands()]
        if len(operands) == 1 and operands[0] in held:
            held.add(name)
        for number, dims in enumerate(mapped.factors.operands):
            if operands[number] not in held:
                continue
            labels = {label for term in dims for label in labels_in(term)}
            inner, outer = (
                {leaf.strip for label in some for leaf in mapped.labels[label].leaves() if leaf.size > 1}
                for some in (labels & mapped.factors.sums, labels - mapped.factors.sums)
            )
            if inner & outer:
                yield name, number


def _with_own_columns(factors: Factors, number: int) -> Factors:
    """The factor map with separate columns for operand `number`: they stay unsharded, and every rank needs
    the other operands in full."""
    operands = [
        dims if place == number else tuple(None if factors.sums.intersection(labels_in(term)) else term for term in dims)
        for place, dims in enumerate(factors.operands)
    ]  # fmt: skip
    others = {place for place, dims in enumerate(factors.operands) if operands[place] != dims}
    return replace(
        factors, operands=tuple(operands), unsharded=factors.unsharded | factors.sums, sums=frozenset(), added=frozenset(),
        replicated=factors.replicated | others,
    )  # fmt: skip


def axes_in(layout: Layout) -> list[Axis]:
    """The axes of all values, then those of all labels."""
    found = [axis for tensors in layout.values.values() for axes in tensors for axis in axes]
    return found + [axis for mapped in layout.mapped.values() for axis in mapped.labels.values()]


def axes_of(dims: Dims, labels: Mapping[str, Axis], shape: tuple[int, ...] | None = None) -> Axes:
    """The axes of a factor map's dims; unlabelled dims get a new axis. shape: their sizes."""
    return tuple(_axis(term, labels, shape[place] if shape else -1) for place, term in enumerate(dims))


def metas_of(program: Program) -> dict[str, tuple[Meta, ...]]:
    """The shapes of every value: graph inputs, constants, and the results of nodes."""
    given = (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    metas = {each.value: (each.meta,) for each in given}
    for name, each in program.constants.items():
        shape, stride = tuple(each.shape), strides_of(each)
        metas[name] = (Meta(shape=shape, dtype=each.dtype, stride=stride, requires_grad=False),)
    return metas | {node.name: node.outputs for node in program.nodes}


def _new_axes(shape: tuple[int, ...]) -> Axes:
    return tuple(Axis(size) for size in shape)


def _map(node: Node, factors: Factors, operands: list[Axes]) -> MappedNode:
    """A node's factor map with the axis of each label: that of the first operand that has it. If another
    operand's axis cannot be unified with it, the label stays unsharded."""
    sizes = _sizes(factors, operands)
    labels: dict[str, Axis] = {}
    unsharded = set(factors.unsharded)
    for dims, axes in zip(factors.operands, operands, strict=True):
        assert len(dims) == len(axes), f"{node.operator}: {dims} for {axes}"
        for term, axis in zip(dims, axes, strict=True):
            if term is not None and not _bind(term, axis, labels, sizes):
                unsharded.update(labels_in(term))
    for label, size in sizes.items():
        labels.setdefault(label, Axis(size))
    return MappedNode(
        node=node,
        factors=factors,
        labels=labels,
        unsharded=frozenset(unsharded),
        exclusive=frozenset(_exclusive(factors)),
    )


def _sizes(factors: Factors, operands: list[Axes]) -> dict[str, int]:
    """The size of every label: that of a dim that consists of it alone, else the factor map's."""
    sizes = dict(factors.sizes)
    for dims, axes in zip(factors.operands, operands, strict=True):
        for term, axis in zip(dims, axes, strict=True):
            if isinstance(term, str) and sizes.get(term, 1) == 1:
                sizes[term] = axis.size
    return sizes


def _bind(term: Term, axis: Axis, labels: dict[str, Axis], sizes: Mapping[str, int]) -> bool:
    """Unifies an axis with a term. False: this is impossible."""
    if isinstance(term, str):
        if term not in labels and axis.size == sizes[term]:
            labels[term] = axis
            return True
        return unify(axis, labels.setdefault(term, Axis(sizes[term])))
    if isinstance(term, Concat):
        bounds = [0, *accumulate(_size(part, sizes) for part in term.parts)]
        if bounds[-1] == axis.size and all(fits(axis, 0, bound) for bound in bounds):
            add_boundaries(axis, bounds)
            stretches = [axis.stretch(start, stop) for start, stop in pairwise(bounds)]
            pairs = zip(term.parts, stretches, strict=True)
            bound = [_bind(part, stretch, labels, sizes) for part, stretch in pairs]
            return all(bound)
    if isinstance(term, Product) and axis.size == _size(term, sizes):
        alone = [part for part in term.parts if _size(part, sizes) != 1]
        if len(alone) == 1:
            return _bind(alone[0], axis, labels, sizes)
    for label in labels_in(term):
        labels.setdefault(label, Axis(sizes[label]))
    return unify(axis, _axis(term, labels, axis.size))


def _size(term: Term, sizes: Mapping[str, int]) -> int:
    if term is None:
        return 1
    if isinstance(term, str):
        return sizes[term]
    each = [_size(part, sizes) for part in term.parts]
    return math.prod(each) if isinstance(term, Product) else sum(each)


def _axis(term: Term, labels: Mapping[str, Axis], size: int) -> Axis:
    if term is None:
        return Axis(size)
    if isinstance(term, str):
        return labels[term]
    parts = [_axis(part, labels, -1) for part in term.parts]
    return product(parts) if isinstance(term, Product) else concatenation(parts)


def _exclusive(factors: Factors) -> Iterator[frozenset[str]]:
    """Pairs of labels in different parts of a concatenation, and those of routed rows and groups."""
    if factors.routed is not None:
        yield frozenset({factors.routed.rows, factors.routed.groups})
    for dims in (*factors.operands, *factors.outputs):
        for term in _terms(dims):
            if isinstance(term, Concat):
                names = [labels_in(part) for part in term.parts]
                yield from (
                    frozenset({one, other})
                    for place, mine in enumerate(names)
                    for theirs in names[:place]
                    for one in mine
                    for other in theirs
                )


def _terms(dims: Dims) -> Iterator[Term]:
    for term in dims:
        yield term
        if isinstance(term, Product | Concat):
            yield from _terms(term.parts)
