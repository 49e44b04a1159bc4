"""Regions: consecutive operators of a program that are compiled together, each as one operator.

    linear  gelu  linear | all-reduce | add  layer_norm  linear  ...
    [ region 0         ]   as it is     [ region 1      ...

Everything that is more than a pure ATen operator stays as it is and ends a region: collectives, opaque modules,
operators that draw (with seeds from Python), results that are numbers or of sizes that depend on values, and a change
of autocast or of grad mode. So do values that recomputation keeps.

Alike regions share compiled code: those that differ in nothing, and, of programs for other sizes of a batch, those of
equal position, where the integers that differ become arguments. Gradients are autograd's, of the compiled regions.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from meshloom.core.compiling import MOST_VARIANTS
from meshloom.program.ir.callables import out_of_place
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program
from meshloom.program.recompute.segments import is_view
from meshloom.program.run.compiler import Compiler

Place = Callable[[Any], Any]  # a constant operand, for the device and dtype of the run
# that compute; what a region's call costs and saves: docs/decisions/0051-small-regions-are-not-compiled.md
LEAST_OPERATORS = 6
_VARYING = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Region:
    """A compiled function of the values that a region reads: one tensor, or a tuple of them.

    numbers: its last arguments.
    """

    def __init__(self, function: Callable[..., Any], numbers: Sequence[int], *, is_single: bool) -> None:
        self._function, self._numbers, self._is_single = function, tuple(numbers), is_single

    def __call__(self, *given: Any) -> Any:
        results = self._function(*given, *self._numbers)
        return results[0] if self._is_single else results


class Regions:
    """Makes the regions of `program`. place: a constant operand as the run needs it."""

    def __init__(self, program: Program, compiler: Compiler, place: Place) -> None:
        self._compiler, self._place = compiler, place
        variables = (*program.parameters.values(), *program.buffers.values(), *program.inputs)
        self._metas: dict[str, Any] = {each.value: each.meta for each in variables}
        self._metas |= {node.name: node.outputs for node in program.nodes}
        self._metas |= {name: (each.shape, each.dtype) for name, each in program.constants.items()}
        self._alike: dict[str, list[Any]] = {}  # skeleton -> sizes of its regions in this program, in order

    def joined(
        self, nodes: Sequence[Node], read_later: Collection[str], kept: Collection[str] = ()
    ) -> tuple[Node, ...]:
        """The nodes, with regions in place of those that can be compiled together.

        read_later: values that are read after the last of `nodes`. kept: nodes that stay as they are.
        """
        runs = list(_runs(nodes, {each.removesuffix(":") for each in kept}))
        found: list[tuple[Node, ...]] = []
        later = set(read_later)
        results: list[tuple[str, ...]] = []
        for run, _ in reversed(runs):
            results.append(tuple(node.name for node in run if node.name in later))
            later.update(ref.name for node in run for ref in node.operands())
        for (run, is_region), wanted in zip(runs, reversed(results), strict=True):
            found.append(self._region(run, wanted) if is_region and wanted else tuple(run))
        return tuple(itertools.chain.from_iterable(found))

    def _region(self, nodes: Sequence[Node], results: tuple[str, ...]) -> tuple[Node, ...]:
        own = {node.name: node for node in nodes}
        read = dict.fromkeys(ref.name for node in nodes for ref in node.operands())
        given = tuple(name for name in read if name not in own)
        function, numbers = self._function(_Source(nodes, given, results, self._place))
        target = Region(function, numbers, is_single=len(results) == 1)
        metas = tuple(meta for name in results for meta in own[name].outputs)

        def node(name: str, target: Any, args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Node:
            first = nodes[0]
            return Node(
                name=name, target=target, args=args, kwargs={}, outputs=outputs, context=first.context, path=first.path,
                line=first.line, draw=None, num_draws=0,
            )  # fmt: skip

        args = tuple(map(Ref, given))
        if len(results) == 1:
            return (node(results[0], target, args, metas),)
        together = f"{results[0]}.region"  # no value of a program has a dot in its name
        picks = [
            node(name, operator.getitem, (Ref(together), at), own[name].outputs)
            for at, name in enumerate(results)
        ]
        return (node(together, target, args, metas), *picks)

    def _function(self, source: _Source) -> tuple[Callable[..., Any], Sequence[int]]:
        """The compiled function of a region, and its last arguments."""
        known, compiler = self._compiler.known, self._compiler
        sizes = source.integers, tuple(self._metas.get(name) for name in source.given)
        alike = self._alike.setdefault(source.skeleton, [])
        if sizes not in alike:
            alike.append(sizes)
        key = source.skeleton, sizes
        if key in known:
            return known[key], ()
        # of other programs' regions of this position
        family = known.setdefault((source.skeleton, alike.index(sizes)), _Family(source.integers))
        if family.is_new:
            family.is_new = False
            known[key] = compiler.function(source.function())
            return known[key], ()
        return family.function(source, compiler)


class _Family:
    """Regions of several programs that differ in sizes alone. first: integers of the first one, whose function has
    them as constants; others share a function in which the integers that differ are arguments."""

    def __init__(self, first: tuple[int, ...]) -> None:
        self.is_new = True
        self._first = first
        self._functions: dict[tuple[int, ...], Callable[..., Any]] = {}

    def function(self, source: _Source, compiler: Compiler) -> tuple[Callable[..., Any], Sequence[int]]:
        differ = tuple(
            at for at, (a, b) in enumerate(zip(source.integers, self._first, strict=True)) if a != b
        )
        for places, function in self._functions.items():
            if set(differ) == set(places):
                return function, [source.integers[at] for at in places]
        if len(self._functions) >= MOST_VARIANTS:
            return source.function(), ()
        function = self._functions[differ] = compiler.function(source.function(differ), dynamic=True)
        return function, [source.integers[at] for at in differ]


class _Source:
    """A region as code. skeleton: equal for regions that differ in integers alone; integers: those of the operands,
    in order."""

    def __init__(
        self, nodes: Sequence[Node], given: tuple[str, ...], results: tuple[str, ...], place: Place
    ) -> None:
        self.nodes, self.given, self.results, self._place = nodes, given, results, place
        numbers: dict[str, int] = {name: at for at, name in enumerate(given)}
        integers: list[int] = []

        def shown(value: Any) -> str:
            if isinstance(value, Ref):
                return f"v{numbers[value.name]}"
            if isinstance(value, tuple | list):
                return f"[{', '.join(map(shown, value))}]"
            if type(value) is int:
                integers.append(value)
                return "#"
            return repr(place(value)) if not isinstance(value, torch.memory_format) else str(value)

        lines: list[str] = []
        for node in nodes:
            operands = [
                *map(shown, node.args),
                *(f"{key}={shown(each)}" for key, each in node.kwargs.items()),
            ]
            numbers[node.name] = len(numbers)
            lines.append(f"v{numbers[node.name]} = {node.target}({', '.join(operands)})")
        lines.append(f"{len(given)} -> {[numbers[name] for name in results]}, {nodes[0].context}")
        self.skeleton, self.integers = "\n".join(lines), tuple(integers)

    def function(self, open_places: Collection[int] = ()) -> Callable[..., tuple[Any, ...]]:
        """The region in Python: (given..., the integers at these places...) -> results."""
        graph = fx.Graph()
        made: dict[str, fx.Node] = {
            name: graph.placeholder(f"given_{at}") for at, name in enumerate(self.given)
        }
        opened = {at: graph.placeholder(f"number_{at}") for at in open_places}
        count = itertools.count()

        def built(value: Any) -> Any:
            if isinstance(value, Ref):
                return made[value.name]
            if isinstance(value, tuple | list):
                return tuple(map(built, value))
            if type(value) is int:
                at = next(count)
                return opened.get(at, value)
            return self._place(value)

        for node in self.nodes:
            target, args = node.target, tuple(map(built, node.args))
            kwargs = {key: built(each) for key, each in node.kwargs.items()}
            if target is out_of_place:  # its operator, on a copy
                target, args = args[0], (graph.call_method("clone", (args[1],)), *args[2:])
            made[node.name] = graph.call_function(target, args, kwargs)
        graph.output(tuple(made[name] for name in self.results))
        return fx.GraphModule(nn.Module(), graph).forward


def _runs(nodes: Sequence[Node], kept: Collection[str]) -> Iterator[tuple[list[Node], bool]]:
    """Consecutive nodes, and whether they are to be compiled together."""
    run: list[Node] = []
    for node in nodes:
        can = _can_compile(node) and node.name not in kept
        if run and (not can or node.context != run[0].context):
            yield run, _is_worth_it(run)
            run = []
        if can:
            run.append(node)
        else:
            yield [node], False
    if run:
        yield run, _is_worth_it(run)


def _can_compile(node: Node) -> bool:
    target = node.args[0] if node.target is out_of_place else node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or node.num_draws or not node.outputs:
        return False
    return target.namespace == "aten" and not any(tag in target.tags for tag in _VARYING)


def _is_worth_it(nodes: Sequence[Node]) -> bool:
    """Whether enough of the operators compute for the call of a region to cost less than it saves."""
    return sum(not is_view(node.target) for node in nodes) >= LEAST_OPERATORS
