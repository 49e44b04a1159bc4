"""The program of each rank, with sharded parameters, local shapes, and reshards where the choice needs
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.comm.pieces import Pieces, Runs
from meshloom.program.ir.contexts import Context
from meshloom.program.ir.nodes import Meta, Node, Ref, Variable, contiguous_strides, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Joint, Transition
from meshloom.program.operators.experts import place_rows, rows_here, take_rows
from meshloom.program.operators.sliced_draws import PartOfDraw
from meshloom.tensor_parallel.fuse import with_gathered_layers
from meshloom.tensor_parallel.layout.axes import Key
from meshloom.tensor_parallel.layout.cuts import pieces_of, route_of, runs_of
from meshloom.tensor_parallel.layout.layout import Axes, axes_of
from meshloom.tensor_parallel.layout.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Cut,
    Part,
    Placement,
    cut_of,
)
from meshloom.tensor_parallel.layout.routes import Route
from meshloom.tensor_parallel.rules.factors import ShardSizes
from meshloom.tensor_parallel.search.choose import DivisionChoice, Held
from meshloom.tensor_parallel.search.costs import is_same, kind_of


@dataclass(frozen=True)
class RoutedRows:
    """The routing of a value whose number of rows on a rank is known at run time only. rows: the value
    with the indices of its rows; dim, size: of the rows of all ranks."""

    rows: str
    dim: int
    size: int


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The program of a rank. routed: values whose shape depends on data."""

    program: Program
    routed: Mapping[str, RoutedRows]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A divided program. parameters, buffers: name -> what each rank holds."""

    choice: DivisionChoice
    parameters: Mapping[str, Pieces]
    buffers: Mapping[str, Pieces]
    summed: tuple[str, ...]  # parameters whose gradients are summed over the ranks, once a step
    _ranks: dict[int, RankProgram] = dataclasses.field(
        default_factory=dict[int, RankProgram], repr=False, compare=False
    )

    def of(self, rank: int) -> RankProgram:
        """The program of one rank, built on first use. Nodes and values have the same names on all ranks."""
        if rank not in self._ranks:
            builder = _Builder(self.choice, rank)
            program = _program(builder, self.parameters, self.buffers)
            self._ranks[rank] = RankProgram(program=program, routed=builder.routed)
        return self._ranks[rank]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks."""
        return tuple(self.of(rank).program for rank in range(self.choice.num_ranks))

    @property
    def held(self) -> Held:
        """The shards that later programs of the same job must have."""
        choice = self.choice
        variables = {**choice.layout.program.parameters, **choice.layout.program.buffers}
        pieces = {**self.parameters, **self.buffers}
        return {
            name: (pieces[name], choice.input_placements[each.value] == INVARIANT)
            for name, each in variables.items()
        }


def partition(choice: DivisionChoice) -> Partition:
    """The shards of parameters and buffers, and each rank's program."""
    program = choice.layout.program
    parameters, buffers = (
        {name: choice.pieces(each.value, choice.input_placements[each.value]) for name, each in variables.items()}
        for variables in (program.parameters, program.buffers)
    )  # fmt: skip
    return Partition(
        choice=choice,
        parameters=parameters,
        buffers=buffers,
        summed=tuple(
            name for name, each in program.parameters.items()
            if each.meta.requires_grad and choice.input_placements[each.value] != INVARIANT and parameters[name].is_shared
        ),
    )  # fmt: skip


def _program(builder: _Builder, parameters: Mapping[str, Pieces], buffers: Mapping[str, Pieces]) -> Program:
    program, rank = builder.choice.layout.program, builder.rank
    for node in program.nodes:
        builder.add(node)
    outputs = tuple(
        builder.read(each, INVARIANT) if isinstance(each, Ref) else each for each in program.outputs
    )
    updates = {name: builder.read(each, INVARIANT) for name, each in program.updates.items()}
    read_last = frozenset(ref.name for ref in refs_in((outputs, tuple(updates.values()))))
    return dataclasses.replace(
        program,
        parameters={
            name: _variable(each, parameters[name], rank) for name, each in program.parameters.items()
        },
        buffers={name: _variable(each, buffers[name], rank) for name, each in program.buffers.items()},
        nodes=with_gathered_layers(builder.nodes, read_last),
        outputs=outputs,
        updates=updates,
    )


def _variable(variable: Variable, pieces: Pieces, rank: int) -> Variable:
    return dataclasses.replace(variable, meta=_local(variable.meta, pieces, rank))


def _local(meta: Meta, pieces: Pieces, rank: int) -> Meta:
    shape = pieces.local_shape(rank)
    if shape == meta.shape:
        return meta
    return dataclasses.replace(meta, shape=shape, stride=contiguous_strides(shape))


class _Builder:
    """Builds one rank's nodes in program order, with every reshard right before the first node that needs
    it."""

    def __init__(self, choice: DivisionChoice, rank: int) -> None:
        self.choice = choice
        self.rank = rank
        self.nodes: list[Node] = []
        self.resharded: dict[tuple[str, Placement], str] = {}
        # value that assigns rows, placement -> the indices of this rank's rows
        self.rows: dict[tuple[str, Placement], str] = {}
        self.routed: dict[str, RoutedRows] = {}
        self._parts: dict[tuple[Meta, tuple[Key, ...], Cut | None], Meta] = {}

    def add(self, node: Node) -> None:
        """Adds the rank's part of a node, after the reshards that it needs."""
        choice, layout = self.choice, self.choice.layout
        strategy = choice.strategies[node.name]
        wanted = iter(strategy.operands)
        args, kwargs = self._replaced((node.args, dict(node.kwargs)), wanted, node)
        target = node.target
        cut = cut_of(strategy.output)
        outputs = tuple(
            self._part(meta, axes, cut)
            for meta, axes in zip(node.outputs, layout.values[node.name], strict=True)
        )
        mapped = layout.mapped.get(node.name)
        if strategy.cut is not None and mapped is not None:
            factors = mapped.factors
            if factors.local is not None:
                target, args, kwargs = factors.local(target, args, kwargs, self._shard_sizes(node, outputs))
            if node.num_draws and not isinstance(target, Joint):
                drawn = factors.outputs[0] if factors.drawn is None else factors.drawn
                axes = axes_of(drawn, mapped.labels)
                pieces = pieces_of(axes, strategy.cut, choice.numbers, choice.num_ranks)
                stride = node.outputs[0].stride if factors.drawn is None else None
                target = PartOfDraw(
                    op=target, sizes=pieces.shape, held=pieces.held[self.rank], count=node.num_draws, stride=stride
                )  # fmt: skip
        elif node.num_draws and mapped is not None and mapped.factors.drawn is None:
            # Nothing is sharded, but memory may have another layout than on one device, which determines the
            # order of draws.
            sizes, stride = node.outputs[0].shape, node.outputs[0].stride
            target = PartOfDraw(
                op=target, sizes=sizes, held=(None,) * len(sizes), count=node.num_draws, stride=stride
            )
        # Received or locally computed tensors may have strides that cannot be viewed.
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        # joint operators key their draws themselves
        draws = 0 if isinstance(target, Joint) else node.num_draws
        self.nodes.append(
            dataclasses.replace(
                node, target=target, args=args, kwargs=kwargs, outputs=outputs, num_draws=draws
            )
        )
        self._note_routed(node)

    def _part(self, meta: Meta, axes: Axes, cut: Cut | None) -> Meta:
        """The local shape of a value, cached by axes."""
        key = meta, tuple(axis.key for axis in axes), cut
        if key not in self._parts:
            pieces = pieces_of(axes, cut, self.choice.numbers, self.choice.num_ranks)
            self._parts[key] = _local(meta, pieces, self.rank)
        return self._parts[key]

    def _note_routed(self, node: Node) -> None:
        """Records which rows a node's value has, if they are routed."""
        axes = self.choice.layout.values[node.name]
        placement = self.choice.placement(node.name)
        found = route_of(axes[0], placement, self.choice.numbers) if len(axes) == 1 else None
        rows = self.rows.get((found[2].value, placement)) if found else None
        if found and rows:
            self.routed[node.name] = RoutedRows(rows, found[0], node.outputs[0].shape[found[0]])

    def read(self, ref: Ref, placement: Placement, node: Node | None = None) -> Ref:
        """The value in a placement. It is resharded once, for all nodes that need it so."""
        source = self.choice.placement(ref.name)
        if source == placement:
            return ref
        if (ref.name, placement) not in self.resharded:
            self.resharded[ref.name, placement] = self._reshard(ref, source, placement, node)
        return Ref(self.resharded[ref.name, placement])

    def _reshard(self, ref: Ref, source: Placement, target: Placement, node: Node | None) -> str:
        choice = self.choice
        meta, axes = choice.layout.metas[ref.name][0], choice.layout.values[ref.name][0]
        before, after = (choice.pieces(ref.name, each) for each in (source, target))
        to_route, from_route = route_of(axes, target, choice.numbers), route_of(axes, source, choice.numbers)
        if to_route is None and from_route is None and is_same(source, target, before, after):
            return ref.name
        if to_route is not None:
            dim = to_route[0]
            args = self.read(ref, REPLICATED, node), self._rows(target, to_route, node), dim
            name = self._add_own(ref, take_rows, args, _local(meta, after, self.rank), node)
            self.routed[name] = RoutedRows(args[1].name, dim, meta.shape[dim])
            return name
        if from_route is not None and target == PARTIAL:
            dim = from_route[0]
            args = ref, self._rows(source, from_route, node), dim, meta.shape[dim]
            return self._add_own(ref, place_rows, args, meta, node)
        given = ref
        if from_route is not None:
            given, source, before = self.read(ref, PARTIAL, node), PARTIAL, choice.pieces(ref.name, PARTIAL)
        elif (
            not meta.requires_grad and before.is_whole and after.is_whole and PARTIAL not in (source, target)
        ):
            return ref.name  # the same values, and no gradients that would differ
        transition = Transition(source=kind_of(source), target=kind_of(target), before=before, after=after)
        return self._add_own(ref, transition, (given,), _local(meta, after, self.rank), node)

    def _rows(self, placement: Placement, routed: tuple[int, int, Route], node: Node | None) -> Ref:
        """The indices of an axis's rows that are routed to this rank, computed once."""
        _, number, route = routed
        cut = cut_of(placement)
        assert cut is not None
        if (route.value, placement) not in self.rows:
            first, stop = cut.parts[number][self.rank]
            assignment = self.read(Ref(route.value), REPLICATED, node)
            runs = runs_of(route.rows, cut, self.choice.numbers, self.rank) or ()
            count = sum(last - start for start, last in runs)
            meta = Meta(shape=(count,), dtype=torch.int64, stride=(1,), requires_grad=False)
            self.rows[route.value, placement] = self._add_own(
                Ref(route.value), rows_here, (assignment, first, stop, route.groups.size, route.is_sorted), meta, node
            )  # fmt: skip
        return Ref(self.rows[route.value, placement])

    def _add_own(self, ref: Ref, target: Any, args: tuple[Any, ...], output: Meta, node: Node | None) -> str:
        """Adds a node of this rank alone, which reshards a value."""
        name = f"{ref.name}__{len(self.resharded) + len(self.rows)}"
        # later users may need gradients, even if the first one does not
        context = Context(autocast=node.context.autocast if node else ())
        path, line = (node.path, node.line) if node else ("", None)
        own = Node(
            name=name, target=target, args=args, kwargs={}, context=context, path=path, line=line, draw=None, num_draws=0, outputs=(output,)
        )  # fmt: skip
        self.nodes.append(own)
        return name

    def _replaced(self, value: Any, wanted: Any, node: Node) -> Any:
        if isinstance(value, Ref):
            return self.read(value, next(wanted), node)
        if isinstance(value, tuple | list):
            return tuple(self._replaced(each, wanted, node) for each in value)
        if isinstance(value, dict):
            return {key: self._replaced(each, wanted, node) for key, each in value.items()}
        return value

    def _shard_sizes(self, node: Node, outputs: tuple[Meta, ...]) -> ShardSizes:
        choice, layout = self.choice, self.choice.layout
        strategy, mapped = choice.strategies[node.name], layout.mapped[node.name]
        local: dict[str, int] = {}
        starts: dict[str, tuple[int, ...]] = {}
        held: dict[str, tuple[Runs | None, ...]] = {}
        for label, axis in mapped.labels.items():
            runs = [runs_of(axis, strategy.cut, choice.numbers, rank) for rank in range(choice.num_ranks)]
            mine = runs[self.rank]
            local[label] = axis.size if mine is None else sum(stop - start for start, stop in mine)
            starts[label] = tuple(each[0][0] if each else 0 for each in runs)
            held[label] = tuple(runs)
        operands = tuple(
            choice.pieces(ref.name, placement).local_shape(self.rank)
            for ref, placement in zip(node.operands(), strategy.operands, strict=True)
        )
        axes = layout.values[node.name]
        return ShardSizes(
            local=local, full={label: axis.size for label, axis in mapped.labels.items()}, operands=operands,
            outputs=tuple(self._shape(output, each, strategy.cut) for output, each in zip(outputs, axes, strict=True)), starts=starts, runs=held, rank=self.rank,
        )  # fmt: skip

    def _shape(self, output: Meta, axes: Axes, cut: Cut | None) -> tuple[int, ...]:
        """The shape of a rank's part of a result; -1: the number of rows routed to it."""
        routed = route_of(axes, Part(cut), self.choice.numbers)
        if routed is None:
            return output.shape
        return *output.shape[: routed[0]], -1, *output.shape[routed[0] + 1 :]
