"""Checks one operator on all ranks, under every strategy that its rule allows, against the unsharded call:
forward, backward, and in-place writes.

The oracle knows only which indices each rank holds; values and gradients follow from the table in
`placement.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from meshloom.comm.pieces import Pieces
from meshloom.core.random import seed_everything
from meshloom.program.ir.callables import keyed
from meshloom.program.ir.contexts import Context
from meshloom.program.ir.draws import CountDraws
from meshloom.program.ir.nodes import Meta, Node, Ref, Variable, refs_in
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.axes import Axis, concatenation, product
from meshloom.tensor_parallel.layout.cuts import StripNumbers, candidates, numbers_of, pieces_of, route_of
from meshloom.tensor_parallel.layout.layout import Layout, axes_in, layout_of
from meshloom.tensor_parallel.layout.placement import PARTIAL, Cut, Part, Placement, cut_of
from meshloom.tensor_parallel.layout.unify import freeze_axes, unify
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import Rules
from meshloom.tensor_parallel.search.choose import DivisionChoice
from meshloom.tensor_parallel.search.strategies import Strategy, strategies_of
from tests.division import add_part, selected
from tests.on_ranks import run_on_ranks
from tests.rule_calls import Chance, OneCall

# float64; sums of a few hundred terms in another order, some of them through square roots and logarithms
TOLERANCE = 1e-9
SEED = 5

Index = list[Tensor]  # the indices of each dim that a rank holds


class Checked:
    """What was checked. cut: label of the rule -> the number of strategies that sharded it."""

    def __init__(self) -> None:
        self.ways = 0
        self.with_cuts = 0
        self.partial = 0
        self.labels: Counter[str] = Counter()


def check_call(one: OneCall, rules: Rules, num_ranks: int, chance: Chance, checked: Checked) -> None:
    """Checks every strategy of a call over `num_ranks` ranks. Raises `AssertionError` with the strategy
    that differs."""
    program, operands = program_of(one)
    layout = layout_of(program, rules)
    _give_parts(layout, chance)
    numbers = numbers_of(layout)
    cuts: dict[int, list[Cut]] = {}
    for cut in candidates(layout, numbers, num_ranks):
        for number in cut.parts:
            cuts.setdefault(number, []).append(cut)
    whole = _Whole(one, operands, [each.meta.requires_grad for each in program.parameters.values()], chance)
    for strategy in strategies_of(program.nodes[0], layout, numbers, cuts):
        try:
            _check(whole, strategy, layout, numbers, num_ranks, chance)
        except Exception as error:
            where = ", ".join(map(str, strategy.operands))
            shapes = [list(each.shape) for each in operands]
            text = f"{program.nodes[0].operator} {program.nodes[0].args} {dict(program.nodes[0].kwargs)} of {shapes}, {num_ranks} ranks, ({where})"
            text += f" -> {strategy.output}, cut {dict(strategy.cut.parts) if strategy.cut else None} of axes {layout.values}"
            raise AssertionError(f"{text}: {error}") from error
        checked.ways += 1
        checked.partial += strategy.output == PARTIAL
        checked.with_cuts += strategy.cut is not None
        mapped = layout.mapped.get(program.nodes[0].name)
        if mapped is not None and strategy.cut is not None:
            checked.labels.update(
                label
                for label, axis in mapped.labels.items()
                if numbers.leaves(axis) & strategy.cut.parts.keys()
            )


def program_of(one: OneCall) -> tuple[Program, list[Tensor]]:
    """A program of one node, whose tensors are parameters."""
    operands: list[Tensor] = []

    def refer(value: Any) -> Any:
        if isinstance(value, Tensor):
            operands.append(value)
            return Ref(f"x{len(operands) - 1}")
        return tuple(map(refer, value)) if isinstance(value, tuple | list) else value

    args, kwargs = refer(one.args), {key: refer(value) for key, value in one.kwargs.items()}
    named = args[len(args) - len(one.given) :]
    fixed = {
        ref.name
        for argument, value in zip(one.schema.arguments, named, strict=False)
        if argument.name in one.fixed
        for ref in refs_in(value)
    }
    graded = [
        (each.is_floating_point() or each.is_complex()) and f"x{place}" not in fixed
        for place, each in enumerate(operands)
    ]
    used = iter(
        [each.clone().requires_grad_(wanted).clone() for each, wanted in zip(operands, graded, strict=True)]
    )
    with CountDraws() as draws:  # with gradients: some kernels return more results then
        outputs = [
            each.detach()
            for each in tree_leaves(one.target(*_filled(one.args, used), **_filled(one.kwargs, used)))
            if isinstance(each, Tensor)
        ]
    copied = len(args) > len(named)  # in-place operators write to a copy
    written = {
        place
        for place, argument in enumerate(one.schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not copied
    }
    updated = {each.name for place in written if place < len(args) and isinstance(each := args[place], Ref)}
    variables = {
        f"x{place}": Variable(value=f"x{place}", name=f"x{place}", meta=_meta(each, graded[place]))
        for place, each in enumerate(operands)
    }
    context = Context()
    metas = tuple(
        _meta(each, (each.is_floating_point() or each.is_complex()) and any(graded)) for each in outputs
    )
    node = Node(
        name="y", target=one.target, args=args, kwargs=kwargs, context=context, path="", line=None,
        draw=0 if draws.count else None, num_draws=draws.count, outputs=metas,
    )  # fmt: skip
    program = Program(
        parameters=variables, buffers={}, constants={}, inputs=(), nodes=(node,), outputs=(), out_spec=tree_flatten(())[1], updates={},
        in_place=frozenset(updated), device=torch.device("cpu"), training=True,
    )  # fmt: skip
    return program, operands


def _meta(tensor: Tensor, graded: bool) -> Meta:
    return Meta(
        shape=tuple(tensor.shape), dtype=tensor.dtype, stride=tuple(tensor.stride()), requires_grad=graded
    )


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Arguments with their tensors replaced, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_filled(each, tensors) for each in value)
    return {key: _filled(each, tensors) for key, each in value.items()} if isinstance(value, dict) else value


def _give_parts(layout: Layout, chance: Chance) -> None:
    """Makes some axes products and concatenations, as if other operators had reshaped and split them."""
    leaves = [
        leaf
        for tensors in layout.values.values()
        for axes in tensors
        for axis in axes
        for leaf in axis.leaves()
    ]
    for leaf in {leaf.strip: leaf for leaf in leaves}.values():
        if leaf.kind is not None or leaf.size < 3 or chance.random.random() < 0.5:
            continue
        divisors = [each for each in range(2, leaf.size) if leaf.size % each == 0]
        if divisors and chance.yes():
            first = chance.one(*divisors)
            unify(leaf, product([Axis(first), Axis(leaf.size // first)]))
        else:
            unify(leaf, concatenation([Axis(size) for size in chance.cut_up(leaf.size, 2)]))
    freeze_axes(axes_in(layout))


class _Whole:
    """The unsharded call: its results, its operands afterwards, and the gradients for random gradients of
    its results."""

    def __init__(
        self, one: OneCall, operands: Sequence[Tensor], graded: Sequence[bool], chance: Chance
    ) -> None:
        self.one = one
        self.operands = [each.detach().clone() for each in operands]
        self.used = [
            each.clone().requires_grad_(wanted) for each, wanted in zip(self.operands, graded, strict=True)
        ]
        taken = iter(self.used)
        args, kwargs = _filled(one.args, taken), _filled(one.kwargs, taken)
        seed_everything(SEED)
        result = keyed(one.target, *args, **kwargs)
        self.results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.cotangents = [
            chance.normal(*each.shape).to(each.dtype) if each.requires_grad else None for each in self.results
        ]
        pairs = [
            (each, given)
            for each, given in zip(self.results, self.cotangents, strict=True)
            if given is not None
        ]
        if pairs:
            torch.autograd.backward([each for each, _ in pairs], [given for _, given in pairs])
        self.gradients = [each.grad for each in self.used]


def _check(
    whole: _Whole, strategy: Strategy, layout: Layout, numbers: StripNumbers, num_ranks: int, chance: Chance
) -> None:
    ranks = range(num_ranks)
    node = layout.program.nodes[0]
    choice = DivisionChoice(
        num_ranks=num_ranks, layout=layout, numbers=numbers, strategies={node.name: strategy},
        input_placements={ref.name: placement for ref, placement in zip(node.operands(), strategy.operands, strict=True)},
        seconds=0.0, chosen=(),
    )  # fmt: skip
    held = [
        _indices(layout.values[ref.name][0], placement, numbers, num_ranks, whole)
        for ref, placement in zip(node.operands(), strategy.operands, strict=True)
    ]
    parts = [
        [each.requires_grad_(used.requires_grad) for each in _given(tensor, placement, index, chance)]
        for tensor, used, placement, index in zip(
            whole.operands, whole.used, strategy.operands, held, strict=True
        )
    ]
    parameters = [
        {ref.name: parts[place][rank] for place, ref in enumerate(node.operands())} for rank in ranks
    ]
    made = partition(choice)
    results: list[list[Tensor]] = [[] for _ in ranks]
    indices = [
        _indices(layout.values[node.name][place], strategy.output, numbers, num_ranks, whole)
        for place in range(len(whole.results))
    ]
    arriving = [
        None if cotangent is None else _gradients(cotangent, strategy.output, index, chance)
        for cotangent, index in zip(whole.cotangents, indices, strict=True)
    ]

    def visit(rank: int, _: Any, value: Any) -> None:
        results[rank] = results[rank] or [each for each in tree_leaves(value) if isinstance(each, Tensor)]

    def backward(rank: int, _: Any) -> None:
        graded = [
            (each, given[rank])
            for each, given in zip(results[rank], arriving, strict=True)
            if given is not None and each.requires_grad
        ]
        if graded:
            torch.autograd.backward([each for each, _ in graded], [gradient for _, gradient in graded])

    run_on_ranks(made.programs, parameters, [{} for _ in ranks], {}, backward, seed=SEED, visit=visit)
    for place, (full, index) in enumerate(zip(whole.results, indices, strict=True)):
        found = [results[rank][place] for rank in ranks]
        for rank in ranks:
            told = made.programs[rank].nodes[0].outputs[place].shape
            known = route_of(layout.values[node.name][place], strategy.output, numbers) is None
            assert not known or tuple(found[rank].shape) == told, (
                f"rank {rank} has {list(found[rank].shape)}, and its program says {list(told)}"
            )
        if whole.one.determined:
            _compare_value(found, full, strategy.output, index, f"result {place}")
    precision = min(
        (torch.finfo(each.dtype).bits for each in whole.results if each.requires_grad), default=64
    )
    for place, (used, gradient) in enumerate(zip(whole.used, whole.gradients, strict=True)):
        _compare_value(
            [parts[place][rank] for rank in ranks],
            used,
            strategy.operands[place],
            held[place],
            f"operand {place} afterwards",
        )
        if used.requires_grad:
            expected = gradient if gradient is not None else torch.zeros_like(used)
            found = [each.grad if each.grad is not None else torch.zeros_like(each) for each in parts[place]]
            _compare_gradient(
                found,
                expected,
                strategy.operands[place],
                held[place],
                f"gradient of operand {place}",
                precision,
            )


def _indices(
    axes: Sequence[Axis], placement: Placement, numbers: StripNumbers, num_ranks: int, whole: _Whole
) -> list[Index]:
    """rank -> the indices that it holds."""
    routed = route_of(tuple(axes), placement, numbers)
    if routed is not None and isinstance(placement, Part) and placement.cut is not None:
        dim, number, route = routed
        told = whole.operands[int(route.value.removeprefix("x"))].tolist()
        size = route.groups.size
        groups = (
            [sum(end <= row for end in told) for row in range(axes[dim].size)]
            if route.is_sorted
            else [each % size for each in told]
        )
        rows = [
            [row for row, group in enumerate(groups) if start <= group < stop]
            for start, stop in placement.cut.parts[number]
        ]
        every = [torch.arange(axis.size) for axis in axes]
        return [
            [
                torch.tensor(each, dtype=torch.long) if place == dim else index
                for place, index in enumerate(every)
            ]
            for each in rows
        ]
    pieces: Pieces = pieces_of(tuple(axes), cut_of(placement), numbers, num_ranks)
    every = [torch.arange(size) for size in pieces.shape]
    return [
        [
            index
            if runs is None
            else torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(*each) for each in runs)])
            for index, runs in zip(every, row, strict=True)
        ]
        for row in pieces.held
    ]


def _addends(tensor: Tensor, count: int, chance: Chance) -> list[Tensor]:
    made = [chance.normal(*tensor.shape).to(tensor.dtype) for _ in range(count - 1)]
    return [*made, tensor - sum(made)]


def _given(tensor: Tensor, placement: Placement, held: list[Index], chance: Chance) -> list[Tensor]:
    """What the ranks hold of a value."""
    if placement == PARTIAL:
        return _addends(tensor, len(held), chance)
    return [selected(tensor, index).clone() for index in held]


def _gradients(gradient: Tensor, placement: Placement, held: list[Index], chance: Chance) -> list[Tensor]:
    """The gradients that ranks receive: the full one, or, of a shard, addends wherever several ranks hold
    an index."""
    if not isinstance(placement, Part):
        return [gradient.clone() for _ in held]
    holders = torch.zeros(gradient.shape, dtype=torch.long)
    for index in held:
        add_part(holders, index, torch.ones_like(selected(holders, index)))
    left, remaining = holders.clone(), gradient.clone()
    given: list[Tensor] = []
    for index in held:
        mine, last = selected(remaining, index), selected(left, index) == 1
        each = torch.where(last, mine, chance.normal(*mine.shape).to(mine.dtype))
        given.append(each)
        add_part(remaining, index, -each)
        add_part(left, index, -torch.ones_like(last, dtype=torch.long))
    return given


def _compare_value(
    found: list[Tensor], whole: Tensor, placement: Placement, held: list[Index], what: str
) -> None:
    if placement == PARTIAL:
        _same(sum(each.detach() for each in found), whole, what)
        return
    for rank, (each, index) in enumerate(zip(found, held, strict=True)):
        _same(each, selected(whole, index), f"{what} on rank {rank}")


def _compare_gradient(
    found: list[Tensor], whole: Tensor, placement: Placement, held: list[Index], what: str, bits: int
) -> None:
    if isinstance(placement, Part):
        total = torch.zeros_like(whole)
        for each, index in zip(found, held, strict=True):
            add_part(total, index, each)
        _same(total, whole, what, bits)
        return
    for rank, each in enumerate(found):
        _same(each, whole, f"{what} on rank {rank}", bits)


def _same(one: Any, other: Tensor, what: str, bits: int = 64) -> None:
    one, other = one.detach(), other.detach()
    assert one.shape == other.shape, f"{what}: {list(one.shape)} and not {list(other.shape)}"
    if not (other.is_floating_point() or other.is_complex()):
        assert torch.equal(one, other), f"{what} differs"
        return
    if not other.numel():
        return
    tolerance = TOLERANCE if min(bits, torch.finfo(other.dtype).bits) == 64 else 1e-5
    close = torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert close.all(), f"{what} differs by {float((one - other).abs().nan_to_num().max()):.1e}"
