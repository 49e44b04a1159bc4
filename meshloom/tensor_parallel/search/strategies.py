"""Strategies: how the ranks can compute a node, given by the placements of its operands and of its result.

invariant     every rank computes the full result from full operands
replicated    the same, with partial gradients, for results that sharded nodes use
cut           every rank computes its shard; if a summed axis is sharded, the result is partial
partial       the node is linear in partial operands, and the result is partial
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshloom.program.ir.nodes import Node
from meshloom.tensor_parallel.layout.axes import Axis
from meshloom.tensor_parallel.layout.cuts import StripNumbers, covers, num_runs
from meshloom.tensor_parallel.layout.layout import Axes, Layout
from meshloom.tensor_parallel.layout.placement import INVARIANT, PARTIAL, REPLICATED, Cut, Part, Placement
from meshloom.tensor_parallel.layout.routes import ANY_ROWS, MappedNode
from meshloom.tensor_parallel.layout.sections import Sections
from meshloom.tensor_parallel.rules.factors import Factors, InnerCollective, labels_in


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """operands: the placement of each, in the order of `Node.operands()`. work: the busiest rank's share of
    the node's work.

    collectives: those inside the node.
    """

    operands: tuple[Placement, ...]
    output: Placement
    work: float = 1.0
    cut: Cut | None = None
    collectives: tuple[InnerCollective, ...] = ()


def placed(axes: Iterable[Axes], cut: Cut, numbers: StripNumbers) -> Part:
    """Sharded by `cut`; replicated if the value has none of its axes."""
    has_axis = any(numbers.leaves(axis) & cut.parts.keys() for each in axes for axis in each)
    return Part(cut) if has_axis else REPLICATED


def strategies_of(
    node: Node, layout: Layout, numbers: StripNumbers, cuts: Mapping[int, list[Cut]]
) -> Iterator[Strategy]:
    """All strategies of a node. cuts: axis number -> its cuts."""
    count = sum(1 for _ in node.operands())
    yield Strategy(operands=(INVARIANT,) * count, output=INVARIANT)
    mapped = layout.mapped.get(node.name)
    if mapped is None:
        if node.target is operator.getitem:
            source = next(iter(node.operands())).name
            axes = layout.values[source]
            every = [*itertools.chain(*axes)]
            yield Strategy(operands=(REPLICATED,), output=REPLICATED)
            yield Strategy(operands=(PARTIAL,), output=PARTIAL)
            for cut in cuts_of(every, numbers, cuts):
                covered = all(covers(each, cut, numbers) for each in axes)
                if covered and _is_reached(node, layout, numbers, every, cut):
                    # Other results of the same node are sharded whether or not this one is.
                    output = placed(layout.values[node.name], cut, numbers)
                    yield Strategy(operands=(Part(cut),), output=output, cut=cut)
        return
    yield Strategy(operands=(REPLICATED,) * count, output=REPLICATED)
    for partial in mapped.factors.linear:
        if partial:
            operands = tuple(PARTIAL if place in partial else REPLICATED for place in range(count))
            yield Strategy(operands=operands, output=PARTIAL)
    for cut in cuts_of(mapped.labels.values(), numbers, cuts):
        strategy = _cut(node, mapped, layout, numbers, cut)
        if strategy is not None:
            yield strategy


def cuts_of(axes: Iterable[Axis], numbers: StripNumbers, cuts: Mapping[int, list[Cut]]) -> list[Cut]:
    """The cuts of some of these axes; of those that shard all of them equally, the first.

    An axis of all layers may be sharded together with an axis of one layer (such as the padding of its
    convolution). For values that only have the first, these cuts are equal.
    """
    numbers_there = dict.fromkeys(number for axis in axes for number in sorted(numbers.leaves(axis)))
    found: dict[object, Cut] = {}
    for number in numbers_there:
        for cut in cuts.get(number, ()):
            own = tuple(sorted((each, parts) for each, parts in cut.parts.items() if each in numbers_there))
            found.setdefault((own, cut.is_product), cut)
    return list(found.values())


def _cut(node: Node, mapped: MappedNode, layout: Layout, numbers: StripNumbers, cut: Cut) -> Strategy | None:
    factors = mapped.factors
    touched = {label: numbers.leaves(axis) & cut.parts.keys() for label, axis in mapped.labels.items()}
    touched = {label: axes for label, axes in touched.items() if axes}
    routed = {label for label in touched if numbers.route(mapped.labels[label], cut) is not None}
    if not touched or _held_whole(touched, mapped) or _clash(touched, mapped, cut):
        return None
    if routed and not (
        _is_reached(node, layout, numbers, mapped.labels.values(), cut) and _can_be_any(routed, node, factors)
    ):
        return None
    if not all(covers((mapped.labels[label],), cut, numbers) for label in touched):
        return None
    num_ranks = len(next(iter(cut.parts.values())))
    for label in touched.keys() & (factors.contiguous | factors.nonempty):
        counts = [num_runs(mapped.labels[label], cut, numbers, rank) for rank in range(num_ranks)]
        if label in factors.contiguous and max(counts) > 1:
            return None
        if label in factors.nonempty and min(counts) < 1:
            return None
    outputs = layout.values[node.name]
    values = [layout.values[ref.name][0] for ref in node.operands()]
    replicated = {
        place
        for place in factors.replicated
        if not any(touched.keys() & set(labels_in(term)) for term in factors.operands[place])
    }
    given = [
        (dims, axes)
        for place, (dims, axes) in enumerate(zip(factors.operands, values, strict=True))
        if place not in replicated
    ]
    for dims, axes in (*given, *zip(factors.outputs, outputs, strict=True)):
        if not covers(axes, cut, numbers):
            return None
        for term, axis in zip(dims, axes, strict=True):
            known = frozenset[int]().union(*(touched.get(label, frozenset()) for label in labels_in(term)))
            if numbers.leaves(axis) & cut.parts.keys() != known:
                # a sharded dim must stay unsharded, or does not match its labels
                return None
    operands: list[Placement] = [
        PARTIAL
        if place in factors.added and touched.keys() & factors.sums
        else REPLICATED
        if place in replicated
        else placed((axes,), cut, numbers)
        for place, axes in enumerate(values)
    ]
    result: Placement = placed(outputs, cut, numbers)
    work = _largest_share(touched, mapped, cut, numbers)
    collectives = tuple(talk for label in touched for talk in factors.collectives.get(label, ()))
    if touched.keys() & (factors.reduced_inside | factors.sums) or collectives:
        sections = Sections(numbers, {number: [cut] for number in cut.parts}, num_ranks)
        counted = sections.pieces(tuple(mapped.labels[label] for label in touched), cut)
        if (result is not REPLICATED and not collectives) or counted.is_shared:
            return None  # indices that several ranks hold would be counted several times
    if touched.keys() & factors.reduced_inside:
        if len(touched) > 1:
            return None
        result, collectives = INVARIANT, ()
    elif touched.keys() & factors.sums:
        result, collectives = PARTIAL, ()
    return Strategy(operands=tuple(operands), output=result, work=work, cut=cut, collectives=collectives)


def _held_whole(touched: Mapping[str, frozenset[int]], mapped: MappedNode) -> bool:
    """Whether a label is sharded that must not be. Rows may be sharded together with their groups."""
    blocked = touched.keys() & mapped.unsharded
    routed = mapped.factors.routed
    if routed is not None and touched.get(routed.groups) == touched.get(routed.rows):
        blocked -= {routed.groups, routed.rows}
    return bool(blocked)


def _is_reached(node: Node, layout: Layout, numbers: StripNumbers, axes: Iterable[Axis], cut: Cut) -> bool:
    """Whether a node can know which rows are routed to a rank under this cut."""
    routes = [found[1] for axis in axes if (found := numbers.route(axis, cut)) is not None]
    return all(route.reaches(layout.order[node.name], node.path) for route in routes)


def _can_be_any(routed: set[str], node: Node, factors: Factors) -> bool:
    """Whether a node works on any number of rows."""
    given = {term for dims in factors.operands for term in dims if isinstance(term, str)}
    alone = factors.sums | factors.reduced_inside | factors.nonempty | factors.contiguous
    alone |= factors.collectives.keys()
    has_sizes = factors.local is not None and factors.routed is None
    takes_any = not has_sizes or node.operator.partition(".")[0] in ANY_ROWS
    return routed <= given and not routed & alone and not node.num_draws and takes_any


def _clash(touched: Mapping[str, frozenset[int]], mapped: MappedNode, cut: Cut) -> bool:
    """Whether two sharded labels multiply, so that shards of both do not cover the result."""
    names = list(touched)
    return any(
        (touched[one] & touched[other] or not cut.is_product)
        and frozenset({one, other}) not in mapped.exclusive
        for place, one in enumerate(names)
        for other in names[:place]
    )


def _largest_share(
    touched: Mapping[str, frozenset[int]], mapped: MappedNode, cut: Cut, numbers: StripNumbers
) -> float:
    """The busiest rank's share of the sharded strips, in the intervals of the labels."""
    leaves = [leaf for label in touched for leaf in mapped.labels[label].leaves() if leaf.strip in numbers.of]
    found = dict.fromkeys((numbers.of[leaf.strip], leaf.start, leaf.stop) for leaf in leaves)
    stretches = [each for each in found if each[0] in cut.parts]
    gone_with = frozenset[int]().union(*touched.values()) - {number for number, _, _ in stretches}
    stretches += [(number, 0, numbers.axes[number].size) for number in sorted(gone_with)]
    together = math.prod if cut.is_product else sum
    shares = [
        together(
            max(0, min(cut.parts[number][rank][1], stop) - max(cut.parts[number][rank][0], start))
            for number, start, stop in stretches
        )
        for rank in range(len(next(iter(cut.parts.values()))))
    ]
    whole = together(stop - start for _, start, stop in stretches)
    return max(shares) / whole if whole else 1.0  # of nothing


def facts_of_strategies(
    node: Node, layout: Layout, numbers: StripNumbers, *, is_dependent: bool
) -> Hashable | None:
    """All facts that a node's strategies depend on. None: they depend on its position in the program, too.
    is_dependent: whether it depends on parameters."""
    mapped = layout.mapped.get(node.name)
    if numbers.routes:
        return None
    if mapped is None:
        names = tuple(ref.name for ref in node.operands())
        operands = names if node.target is operator.getitem else len(names)
        return is_dependent, operands, _keys(itertools.chain(*layout.values[node.name]))
    values = (layout.values[ref.name][0] for ref in node.operands())
    labels = tuple(mapped.labels), _keys(mapped.labels.values())
    axes = tuple(map(_keys, values)), tuple(map(_keys, layout.values[node.name]))
    own = is_dependent, node.operator, node.num_draws
    return *own, mapped.factors.facts, labels, mapped.unsharded, mapped.exclusive, axes


def _keys(axes: Iterable[Axis]) -> tuple[Hashable, ...]:
    """Keys that are equal for the same axis, and for axes without anything to shard."""
    return tuple((axis.start, axis.size, axis.strip if axis.strip.size > 1 else None) for axis in axes)
