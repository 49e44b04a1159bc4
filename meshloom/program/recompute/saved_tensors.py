"""How to recompute the tensors that autograd saved in a segment: which operators run, on which kept values.

saved by      owner of its memory        recomputation
norm          x, from another segment    none: it is kept anyway
linear        norm                       norm runs on x
attention     attention, internal        attention runs on q, k, v, which are kept, and saves it again
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshloom.program.ir.draws import passing_over_draws
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.sparse_constants import memory_of, offset_of, strides_of
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.operators.collectives import Joint, Transition, elements_of_change
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.program.recompute.segments import Segment


@dataclass(frozen=True, kw_only=True)
class Source:
    """A saved tensor as a part of a value. position: index in a node's tensors. layout: shape, strides and
    offset in its memory, if it is not the whole value."""

    value: str
    position: int | None = None
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def of(self, value: Any) -> Tensor:
        """The tensor, taken from the value."""
        tensor: Tensor = value if self.position is None else value[self.position]
        return tensor.detach() if self.layout is None else tensor.detach().as_strided(*self.layout)


@dataclass(frozen=True, kw_only=True)
class Save:
    """A tensor that autograd saved during `node`. owner: the value that owns its memory, or its creator.

    inside: whether that memory is internal to the owner.
    source: where it can be taken from; None: only from the operator that creates it, when that is recomputed.
    like: number of the first save of that memory. layout: within that.
    """

    node: str
    owner: str
    inside: bool
    source: Source | None
    like: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(frozen=True, kw_only=True)
class SegmentRecomputation:
    """How a segment is recomputed. again: for every saved tensor, whether it is recomputed; others are kept.

    nodes: the nodes to run. held_given, held_made: their inputs, of earlier segments and of this one.
    captures: number of a save in the second run -> the saved tensors that it equals, each with its own
        layout.
    sources: number of a saved tensor -> where it is taken from. first_draw: the first of `nodes` that draws.
    """

    again: tuple[bool, ...]
    nodes: tuple[Node, ...]
    held_given: tuple[str, ...]
    held_made: tuple[str, ...]
    captures: Mapping[int, Sequence[tuple[int, tuple[Any, ...] | None]]]
    sources: Mapping[int, Source]
    first_draw: str | None


def recomputation_of(
    segment: Segment, saves: Sequence[Save], borders: Collection[str], kept: Collection[str], needed: Collection[int] | None = None
) -> SegmentRecomputation:  # fmt: skip
    """How a segment is recomputed. borders: owners of the memory that later segments read. kept: nodes whose
    results are kept, and `NODE:` for nodes whose inner tensors are.

    needed: numbers of the saves that a backward can use; None: all. Received values are kept, not sent again, and
    what opaque modules return and save, as they may have effects and save as much as values say.
    """
    by_name = {node.name: node for node in segment.nodes}
    opaque = {node.name for node in segment.nodes if is_opaque(node)}
    communicating = {node.name for node in segment.nodes if communicates(node.target)} | opaque
    stops = {*kept, *communicating, *segment.results, *borders} & by_name.keys()

    def is_kept(save: Save) -> bool:
        if save.node in opaque:
            return True
        if save.inside:
            return f"{save.owner}:" in kept or save.owner in communicating
        return save.owner not in by_name or save.owner in stops

    again = tuple(
        not is_kept(save) and (needed is None or number in needed) for number, save in enumerate(saves)
    )
    running: set[str] = set()
    held: set[str] = set()

    waiting: list[str] = []

    def need(value: str) -> None:
        if value in stops or value not in by_name:
            held.add(value)
        else:
            waiting.append(value)

    for save in itertools.compress(saves, again):
        if save.source is None:
            waiting.append(saves[save.like].node)
        else:
            need(save.source.value)
    while waiting:
        current = waiting.pop()
        if current not in running:
            running.add(current)
            for ref in by_name[current].operands():
                need(ref.name)
    repeated = [number for number, save in enumerate(saves) if save.node in running]
    second = {number: at for at, number in enumerate(repeated)}
    captures: dict[int, list[tuple[int, tuple[Any, ...] | None]]] = {}
    sources: dict[int, Source] = {}
    for number, save in enumerate(saves):
        if not again[number]:
            continue
        if number in second:
            captures.setdefault(second[number], []).append((number, None))
        elif save.source is not None:
            sources[number] = save.source
        else:
            captures.setdefault(second[save.like], []).append((number, save.layout))
    nodes = [node for node in segment.nodes if node.name in running]
    return SegmentRecomputation(
        again=again,
        nodes=_with_gaps_between_draws(nodes),
        held_given=tuple(name for name in segment.given if name in held),
        held_made=tuple(node.name for node in segment.nodes if node.name in held),
        captures=captures,
        sources=sources,
        first_draw=next((node.name for node in nodes if node.num_draws), None),
    )


def communicates(target: Any) -> bool:
    """Whether ranks send each other something when this runs forward."""
    if isinstance(target, Transition):
        change = target.source, target.target, target.before, target.after
        return elements_of_change(*change, 0, backward=False) is not None
    if isinstance(target, GatheredLayers):
        return target.change.source == "part"
    return isinstance(target, Joint)


def saves_of(
    segment: Segment, values: Mapping[str, Any], saved: Iterable[tuple[str, Tensor]]
) -> tuple[list[Save], set[str]]:
    """What was saved while a segment ran once, and the owners of the memory that later segments read.

    values: all that was given and made, in order. saved: the node that ran, and the tensor.
    """
    owners: dict[int, Source] = {}
    exact: dict[Any, Source] = {}
    for name, value in values.items():
        for source, tensor in _tensors(name, value):
            owners.setdefault(memory_of(tensor), source)
            exact.setdefault(_place(tensor), source)
    borders = {
        owners[memory_of(tensor)].value
        for name in segment.results
        for _, tensor in _tensors(name, values[name])
    }
    saves: list[Save] = []
    inside: dict[int, tuple[int, Any]] = {}  # memory -> number of its first save, and where that lies
    for number, (node, tensor) in enumerate(saved):
        memory, place = memory_of(tensor), _place(tensor)
        owner = owners.get(memory)
        if owner is None:
            like, first = inside.setdefault(memory, (number, place))
            layout = None if place == first else _layout(tensor)
            creator = saves[like].node if like < number else node
            saves.append(Save(node=node, owner=creator, inside=True, source=None, like=like, layout=layout))
            continue
        source = exact.get(place)
        plain = not tensor.is_conj() and not tensor.is_neg()
        if source is None and plain and tensor.dtype == owner.of(values[owner.value]).dtype:
            source = replace(owner, layout=_layout(tensor))
        saves.append(Save(node=node, owner=owner.value, inside=False, source=source, like=number))
    return saves, borders


def _tensors(name: str, value: Any) -> list[tuple[Source, Tensor]]:
    if isinstance(value, Tensor):
        return [(Source(value=name), value)]
    if isinstance(value, tuple | list):
        several: Sequence[Any] = value
        return [
            (Source(value=name, position=position), each)
            for position, each in enumerate(several)
            if isinstance(each, Tensor)
        ]
    return []


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), strides_of(tensor), offset_of(tensor)


def _place(tensor: Tensor) -> Any:
    return memory_of(tensor), _layout(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _with_gaps_between_draws(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Draws are numbered within the chunk; numbers of operators that do not run again are passed over."""
    found: list[Node] = []
    at: int | None = None
    for node in nodes:
        if node.num_draws:
            assert node.draw is not None
            if at is not None and node.draw != at:
                found.append(passing_over_draws(node, node.draw - at))
            at = node.draw + node.num_draws
        found.append(node)
    return tuple(found)
