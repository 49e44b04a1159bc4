"""What a layout says two values have in common, against index arithmetic: random programs that take values
apart and put them together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from meshloom.program.ir.contexts import Context
from meshloom.program.ir.nodes import Input, Meta, Node, Ref, contiguous_strides
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.axes import Axis
from meshloom.tensor_parallel.layout.cuts import StripNumbers, candidates, covers, numbers_of, pieces_of
from meshloom.tensor_parallel.layout.layout import Layout, layout_of
from meshloom.tensor_parallel.rules.factors import Term, labels_in
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.covering import few

aten = torch.ops.aten
Element = tuple[str, int, int]  # value, dim, index
Address = tuple[tuple[int, int], ...]  # strips and places in them


@dataclass
class Written:
    """A program of one's own. pairs: (node, element of an operand, element of the result) that are one by
    index arithmetic; of reshapes several are one."""

    draw: random.Random
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    steps: list[tuple[str, Node, tuple[Any, ...]]] = field(default_factory=list)

    def call(self, kind: str, target: Any, args: tuple[Any, ...], told: tuple[Any, ...] = ()) -> str:
        name = f"v{len(self.nodes)}"
        shape = tuple(target(*_on_meta(args, self.shapes)).shape)
        self.nodes.append(
            Node(
                name=name,
                target=target,
                args=args,
                kwargs={},
                context=Context(),
                path="",
                line=None,
                draw=None,
                num_draws=0,
                outputs=(_meta(shape),),
            )
        )
        self.shapes[name] = shape
        self.steps.append((kind, self.nodes[-1], told))
        return name

    def add_any(self) -> None:
        """One more node, on values that are there."""
        draw = self.draw
        value = draw.choice(list(self.shapes))
        shape = self.shapes[value]
        dim = draw.randrange(len(shape))
        size = shape[dim]
        kind = draw.choice(["slice", "slice", "pad", "roll", "cat", "reshape", "add", "add", "add"])
        if kind == "slice" and size > 2:
            start = draw.choice([0, 1, size // 2, draw.randrange(size - 1)])
            stop = draw.choice([size, size - 1, draw.randrange(start + 1, size + 1)])
            if start < stop:
                self.call("slice", aten.slice.Tensor, (Ref(value), dim, start, stop), (dim, start))
        elif kind == "pad":
            before, after = draw.choice([(1, 0), (0, 1), (2, 1), (size // 2, 0)])
            pad = (0, 0) * (len(shape) - 1 - dim) + (before, after)
            self.call("pad", aten.constant_pad_nd.default, (Ref(value), pad), (dim, before))
        elif kind == "roll":
            self.call("roll", aten.roll.default, (Ref(value), (draw.randrange(size),), (dim,)))
        elif kind == "cat":
            fitting = [
                each for each, other in self.shapes.items()
                if len(other) == len(shape) and all(one == two for place, (one, two) in enumerate(zip(shape, other, strict=True)) if place != dim)
            ]  # fmt: skip
            self.call("cat", aten.cat.default, ((Ref(value), Ref(draw.choice(fitting))), dim), (dim,))
        elif kind == "reshape" and len(shape) == 1:
            if factors := [each for each in (2, 3, 4, size // 2) if 1 < each < size and size % each == 0]:
                first = draw.choice(factors)
                self.call("split", aten.view.default, (Ref(value), (first, size // first)))
        elif kind == "reshape":
            self.call("merge", aten.reshape.default, (Ref(value), (shape[0] * shape[1],)))
        elif kind == "add":
            self.call(
                "add",
                aten.add.Tensor,
                (
                    Ref(value),
                    Ref(draw.choice([each for each, other in self.shapes.items() if other == shape])),
                ),
            )

    def offset(self, kind: str, refs: Sequence[str], told: tuple[Any, ...], number: int, dim: int) -> int:
        """Index of the result less that of the operand of this number, along dim."""
        if not told or dim != told[0]:
            return 0
        before = sum(self.shapes[each][dim] for each in refs[:number])
        return {"slice": -told[-1], "pad": told[-1], "cat": before}[kind]

    def program(self, inputs: Sequence[str]) -> Program:
        return Program(
            parameters={}, buffers={}, constants={}, inputs=tuple(Input(value=each, name=each, meta=_meta(self.shapes[each])) for each in inputs),
            nodes=tuple(self.nodes), outputs=(), out_spec=tree_flatten(())[1], updates={}, in_place=frozenset(), device=torch.device("cpu"), training=True,
        )  # fmt: skip


def _meta(shape: tuple[int, ...]) -> Meta:
    return Meta(shape=shape, dtype=torch.float32, stride=contiguous_strides(shape), requires_grad=True)


def _on_meta(args: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    if isinstance(args, Ref):
        return torch.empty(shapes[args.name], device="meta")
    return tuple(_on_meta(each, shapes) for each in args) if isinstance(args, tuple) else args


def written(seed: int, num_nodes: int, size: int, *, without: str = "") -> tuple[Written, list[str]]:
    """A random program on three vectors and two matrices; those of one number of dims are of one size, so
    that they meet."""
    made = Written(random.Random(seed))
    made.shapes = {"x": (size,), "y": (size,), "z": (size - 1,), "m": (4, size), "n": (4, size)}
    inputs = list(made.shapes)
    while len(made.nodes) < num_nodes:
        if sum(size for shape in made.shapes.values() for size in shape) > 60 * (size + 4):
            break
        made.add_any()
        if made.steps and made.steps[-1][0] in ("split", "merge") and without == "reshape":
            made.steps.pop()
            del made.shapes[made.nodes.pop().name]
    return made, inputs


def some_of(indices: range, draw: random.Random) -> Sequence[int]:
    """All of them, or the first, the last and a few between."""
    return indices if len(indices) <= 64 else [*indices[:2], *draw.sample(indices, 12), *indices[-2:]]


def pairs_of(made: Written) -> list[tuple[Node, list[Element], list[Element], int]]:
    """(node, elements of an operand that together are those of the result, the other way round where dims
    become one; number of the operand).

    Of long dims: some.
    """
    found: list[tuple[Node, list[Element], list[Element], int]] = []
    for kind, node, told in made.steps:
        refs = [ref.name for ref in node.operands()]
        out = made.shapes[node.name]
        for number, ref in enumerate(refs):
            shape = made.shapes[ref]
            if kind in ("split", "merge"):
                matrix, vector = (node.name, ref) if kind == "split" else (ref, node.name)
                rows, columns = made.shapes[matrix]
                found += [
                    (node, [(vector, 0, row * columns + column)], [(matrix, 0, row), (matrix, 1, column)], number)
                    for row in some_of(range(rows), made.draw) for column in some_of(range(columns), made.draw)
                ]  # fmt: skip
                continue
            for dim, size in enumerate(shape):
                offset = made.offset(kind, refs, told, number, dim)
                kept = range(max(0, -offset), min(size, out[dim] - offset))
                found += [
                    (node, [(ref, dim, index)], [(node.name, dim, index + offset)], number)
                    for index in some_of(kept, made.draw)
                ]
    return found


def address(axis: Axis, index: int, strips: dict[int, int]) -> Address:
    """Where an index of an axis is in the strips that the axis is made of."""
    if axis.kind is None:
        return (
            ((strips.setdefault(id(axis.strip), len(strips)), axis.start + index),)
            if axis.strip.size > 1
            else ()
        )
    if axis.kind == "concatenation":
        for part in axis.parts:
            if index < part.size:
                return address(part, index, strips)
            index -= part.size
    found: Address = ()
    for part in reversed(axis.parts):
        index, place = divmod(index, part.size)
        found = address(part, place, strips) + found
    return found


def is_told(layout: Layout, node: Node, elements: Sequence[Element], number: int) -> bool:
    """Whether the map of a node says what the dims of these elements are, and that they may be cut."""
    mapped = layout.mapped[node.name]
    for value, dim, _ in elements:
        dims = mapped.factors.outputs[0] if value == node.name else mapped.factors.operands[number]
        term: Term = dims[dim]
        if term is None or set(labels_in(term)) & mapped.unsharded:
            return False
    return True


@pytest.mark.parametrize("sizes", [(12, 16, 24), (131_072, 999_999, 1_000_000)], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.every
def test_indices_that_a_node_pairs_are_one(seed: int, sizes: Sequence[int]):
    """What a rank needs of an operand for its part of the result is what the cut gives it: or the node's
    label is one to be whole."""
    made, inputs = written(seed, 14, sizes[seed % 3])
    layout = layout_of(made.program(inputs), BUILT_IN)
    strips: dict[int, int] = {}
    checked = 0
    for node, one, other, number in pairs_of(made):
        if is_told(layout, node, [*one, *other], number):
            mine, theirs = (
                sum((address(layout.values[value][0][dim], index, strips) for value, dim, index in each), ())
                for each in (one, other)
            )
            assert mine == theirs, f"{node.operator} {node.args}: {one} {mine}, {other} {theirs}"
            checked += 1
    assert checked


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.every
def test_indices_that_are_one_were_paired(seed: int):
    """By any chain of nodes: slices, pads, concatenations and sums. A roll is whole, and its indices go by
    their places."""
    made, inputs = written(seed, 16, (12, 16, 23)[seed % 3], without="reshape")
    layout = layout_of(made.program(inputs), BUILT_IN)
    spoken: dict[Element, Element] = {}

    def find(element: Element) -> Element:
        while element in spoken:
            element = spoken[element]
        return element

    for _, (one,), (other,), _ in pairs_of(made):
        if find(one) != find(other):
            spoken[find(one)] = find(other)
    strips: dict[int, int] = {}
    first: dict[Address, Element] = {}
    for value, tensors in layout.values.items():
        for dim, axis in enumerate(tensors[0]):
            for index in range(axis.size):
                if place := address(axis, index, strips):
                    known = first.setdefault(place, (value, dim, index))
                    assert find(known) == find((value, dim, index)), f"{known} and {(value, dim, index)}"


def places(axis: Axis, wanted: tuple[int, int], strips: dict[int, int]) -> list[int]:
    """The indices of an axis that are this place of this strip: of strips one after another, not of
    products."""
    if axis.kind is None:
        here = (
            axis.strip.size > 1
            and strips.get(id(axis.strip)) == wanted[0]
            and 0 <= wanted[1] - axis.start < axis.size
        )
        return [wanted[1] - axis.start] if here else []
    found, before = [], 0
    for part in axis.parts if axis.kind == "concatenation" else ():
        found += [before + each for each in places(part, wanted, strips)]
        before += part.size
    return found


def together(made: Written, start: Element, most: int) -> set[Element] | None:
    """All elements that any chain of nodes pairs with this one; None: more than so many."""
    links: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
    for kind, node, told in made.steps:
        refs = [ref.name for ref in node.operands()]
        for number, ref in enumerate(refs):
            for dim in range(len(made.shapes[ref])):
                offset = made.offset(kind, refs, told, number, dim)
                links.setdefault((ref, dim), []).append((node.name, dim, offset))
                links.setdefault((node.name, dim), []).append((ref, dim, -offset))
    found, new = {start}, [start]
    while new and len(found) <= most:
        value, dim, index = new.pop()
        for other, along, offset in links.get((value, dim), ()):
            if (
                0 <= index + offset < made.shapes[other][along]
                and (other, along, index + offset) not in found
            ):
                found.add((other, along, index + offset))
                new.append((other, along, index + offset))
    return None if new else found


@pytest.mark.parametrize("seed", few(range(12), 4))
def test_of_a_million_indices_those_that_are_one_were_paired(seed: int):
    """Those of a few that are drawn. Of an axis that is added to itself further on every index is paired with
    every other: those are not followed."""
    made, inputs = written(seed, 16, (131_072, 999_999, 1_000_000)[seed % 3], without="reshape")
    layout = layout_of(made.program(inputs), BUILT_IN)
    strips: dict[int, int] = {}
    followed = 0
    for value, dim in [(value, dim) for value, shape in made.shapes.items() for dim in range(len(shape))]:
        for index in some_of(range(made.shapes[value][dim]), made.draw):
            paired, place = (
                together(made, (value, dim, index), 2_000),
                address(layout.values[value][0][dim], index, strips),
            )
            if paired is None or not place:
                continue
            for other, axes in layout.values.items():
                for along, axis in enumerate(axes[0]):
                    assert {(other, along, each) for each in places(axis, place[0], strips)} <= paired
                    followed += 1
    assert followed


@pytest.mark.parametrize("seed", range(10))
def test_the_parts_of_a_cut_make_up_every_value_that_it_covers(seed: int):
    made, inputs = written(seed, 12, 24)
    layout = layout_of(made.program(inputs), BUILT_IN)
    numbers: StripNumbers = numbers_of(layout)
    for cut in candidates(layout, numbers, 3):
        for tensors in layout.values.values():
            pieces = pieces_of(tensors[0], cut, numbers, 3)
            if covers(tensors[0], cut, numbers):
                whole = torch.zeros(pieces.shape)
                for row in pieces.held:
                    dims = [
                        range(size) if runs is None else [each for run in runs for each in range(*run)]
                        for size, runs in zip(pieces.shape, row, strict=True)
                    ]
                    if all(map(len, dims)):
                        whole[
                            torch.meshgrid(*[torch.tensor(list(each)) for each in dims], indexing="ij")
                        ] += 1
                assert (whole >= 1).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_program_has_as_many_parts_at_a_million_as_at_a_thousand(seed: int):
    """Structure follows from how the program is written."""

    def parts(size: int) -> list[int]:
        made = Written(random.Random(seed))
        made.shapes = {"x": (size,), "y": (size,), "m": (4, size)}
        for _ in range(30):
            shift = made.draw.choice([1, 2, 3])
            value = made.draw.choice([name for name, shape in made.shapes.items() if len(shape) == 1])
            length = made.shapes[value][0]
            kind = made.draw.randrange(5)
            if kind == 0:
                made.call("slice", aten.slice.Tensor, (Ref(value), 0, shift, length))
            elif kind == 1:
                made.call("pad", aten.constant_pad_nd.default, (Ref(value), (shift, 0)))
            elif kind == 2:
                made.call("cat", aten.cat.default, ((Ref("x"), Ref("y")), 0))
            else:
                same = [name for name, shape in made.shapes.items() if shape == (length,)]
                made.call("add", aten.add.Tensor, (Ref(value), Ref(made.draw.choice(same))))
        layout = layout_of(made.program(["x", "y", "m"]), BUILT_IN)
        return [
            sum(1 for _ in axis.leaves())
            for tensors in layout.values.values()
            for axes in tensors
            for axis in axes
        ]

    assert parts(1_000) == parts(1_000_000)
    assert max(parts(1_000_000)) <= 30
