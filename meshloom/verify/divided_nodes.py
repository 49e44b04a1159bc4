"""The first operator of a divided program whose parts are not what one device computes.

The undivided program runs, then all ranks' in lockstep, on the model's initial values and the same draws.
Forward, the first operator whose value differs is named; if all agree, backward, the last one whose value's
gradient does.

No value is kept to be compared. Of each, and of its gradient, there is one number: its inner product with a
random tensor, seeded by its name. It is linear, so that ranks' parts, each with its part of the random
tensor, add up to what one device has; and two values that differ have different ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.comm.pieces import Pieces, take
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.ir.lines import describe_line
from meshloom.program.ir.nodes import Node
from meshloom.program.run.execute import run_program
from meshloom.tensor_parallel.layout.cuts import pieces_of, route_of
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part, cut_of
from meshloom.tensor_parallel.lockstep import run_in_lockstep
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.search.choose import DivisionChoice

TOLERANCE = 1e-9  # of float64, in which both run; rounding of the deepest families stays below 1e-12
_SEED = 7


def first_difference(part: Partition, model: nn.Module, batch: Any) -> str:
    """One sentence: which operator, at which line of the user's, or that all agree. model: whole, in the
    program's precision."""
    program = part.choice.layout.program
    state = {
        name: each.detach().double() if each.is_floating_point() else each.detach()
        for name, each in _state(model).items()
    }
    whole, parts = _Seen(part.choice), _Seen(part.choice)
    with preserved_draws():
        seed_everything(_SEED)
        _backward(
            [
                run_program(
                    program,
                    *_split(program, state, None, 0),
                    batch,
                    dtype=torch.float64,
                    visit=whole.note_whole,
                )
            ]
        )
        seed_everything(_SEED)
        split = [_split(program, state, part, rank) for rank in range(part.choice.num_ranks)]
        _backward(
            run_in_lockstep(
                part.programs,
                [each[0] for each in split],
                [each[1] for each in split],
                batch,
                dtype=torch.float64,
                visit=parts.note_parts,
            )
        )
    for name, values in whole.values.items():
        if name in parts.nodes and (error := _error(values, parts.values[name])) > TOLERANCE:
            return f"In lockstep the first operator whose parts differ is {_named(whole.nodes[name], part)}: by {error:.1e}."
    for name in reversed(whole.nodes):
        if (
            name in parts.nodes
            and (error := _error(whole.gradients[name], parts.gradients[name])) > TOLERANCE
        ):
            return f"In lockstep all values agree; backward, the first gradient that differs is that of {_named(whole.nodes[name], part)}: by {error:.1e}."
    return "In lockstep every operator's parts agree with one device, forward and backward: the ranks' programs are right, and what they send each other is not."


@dataclass(frozen=True)
class _Mark:
    """Of one tensor: its inner products with the random one, or each rank's with its part of it. scale: 1 +
    its largest element, times the root of their number."""

    products: tuple[float, ...]
    scale: float


Marks = dict[int, _Mark]  # by number of the tensor in the value


@dataclass
class _Seen:
    """What every operator gave, and the gradients of it: on one device, or on all ranks."""

    choice: DivisionChoice
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    values: dict[str, Marks] = field(default_factory=dict[str, Marks])
    gradients: dict[str, Marks] = field(default_factory=dict[str, Marks])

    def note_whole(self, node: Node, value: Any) -> None:
        """One device's value."""
        self._begin(node)
        for number, each in enumerate(tree_leaves(value)):
            if isinstance(each, Tensor) and each.numel():
                self._note_tensor(node.name, number, each)

    def note_parts(self, node: Node, results: list[Any]) -> None:
        """All ranks' values."""
        if node.name not in self.choice.layout.values:
            return  # a step of a change of placement, of which one device has none
        self._begin(node)
        everyone = [tree_leaves(each) for each in results]
        for number in range(len(everyone[0])):
            mine = [leaves[number] for leaves in everyone]
            if all(isinstance(each, Tensor) for each in mine):
                self._note_parts(node.name, number, mine)

    def _begin(self, node: Node) -> None:
        self.nodes[node.name] = node
        self.values[node.name], self.gradients[node.name] = {}, {}

    def _note_tensor(self, name: str, number: int, value: Tensor) -> None:
        pieces = self._pieces(name, number)
        if pieces is None:
            return
        random, placement = _random(name, number, value.shape), self.choice.strategies[name].output
        if isinstance(placement, Part):
            products = tuple(
                _product(take(pieces, rank, value), take(pieces, rank, random))
                for rank in range(self.choice.num_ranks)
            )
        else:
            products = (_product(value, random),)
        self.values[name][number] = _Mark(products, _scale(value))

        def hook(gradient: Tensor) -> None:
            self.gradients[name][number] = _Mark(
                (_product(gradient, _random(name, number, gradient.shape)),), _scale(gradient)
            )

        if value.requires_grad:
            value.register_hook(hook)

    def _note_parts(self, name: str, number: int, mine: list[Tensor]) -> None:
        pieces, placement = self._pieces(name, number), self.choice.strategies[name].output
        if pieces is None:
            return
        adds_up = isinstance(placement, Part)  # gradients of parts do, and so do values that are partial sums

        def product(rank: int, each: Tensor) -> float:
            random = _random(name, number, pieces.shape)
            return _product(each, take(pieces, rank, random) if isinstance(placement, Part) else random)

        products = tuple(product(rank, each) for rank, each in enumerate(mine))
        self.values[name][number] = _Mark((sum(products),) if placement == PARTIAL else products, 0.0)
        found = [0.0] * len(mine)

        def hook(rank: int, gradient: Tensor) -> None:
            found[rank] = product(rank, gradient)
            self.gradients[name][number] = _Mark((sum(found),) if adds_up else tuple(found), 0.0)

        for rank, each in enumerate(mine):
            if each.requires_grad:
                each.register_hook(partial(hook, rank))

    def _pieces(self, name: str, number: int) -> Pieces | None:
        """What each rank holds; None where that is not known here: where such rows are put together again
        they are compared."""
        axes, placement = self.choice.layout.values[name][number], self.choice.strategies[name].output
        if route_of(axes, placement, self.choice.numbers) is not None:
            return None
        return pieces_of(axes, cut_of(placement), self.choice.numbers, self.choice.num_ranks)


def _random(name: str, number: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(derive(_SEED, name, number))
    return torch.empty(tuple(shape), dtype=torch.float64).uniform_(-1, 1, generator=generator)


def _product(value: Tensor, random: Tensor) -> float:
    """<value, random>; of complex numbers the real and twice the imaginary part together. NaN if the shapes
    differ."""
    if value.shape != random.shape:
        return math.nan
    plain = value.detach()
    if plain.is_complex():
        return _product(plain.real, random) + 2 * _product(plain.imag, random)
    # what is not finite is the same on both sides, or differs by this
    finite = torch.nan_to_num(plain.double(), 1.5, 2.5, -3.5)
    return float((finite * random.to(plain.device)).sum())


def _scale(value: Tensor) -> float:
    plain = value.detach()
    sizes = (plain if plain.is_complex() else plain.double()).abs().double()
    largest = torch.nan_to_num(sizes, 0.0, 0.0, 0.0).max() if sizes.numel() else 0.0
    return (1 + float(largest)) * math.sqrt(max(value.numel(), 1))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _split(
    program: Any, state: dict[str, Tensor], part: Partition | None, rank: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, which share memory with `state`, and buffers of one device, or of a rank."""

    def mine(name: str, pieces: Any) -> Tensor:
        return (take(pieces[name], rank, state[name]) if part else state[name]).detach()

    parameters = {
        name: mine(name, part and part.parameters).requires_grad_(each.meta.requires_grad)
        for name, each in program.parameters.items()
    }
    return parameters, {name: mine(name, part and part.buffers).clone() for name in program.buffers}


def _backward(results: Sequence[Any]) -> None:
    losses = [tree_leaves(each)[0] for each in results]
    if all(isinstance(each, Tensor) and each.requires_grad for each in losses):
        torch.autograd.backward([each.sum() for each in losses])


def _error(whole: Marks, parts: Marks) -> float:
    worst = 0.0
    for number, mark in whole.items():
        ours = parts[number].products if number in parts else (0.0,)  # a gradient that no rank has
        ones = mark.products * len(ours) if len(mark.products) == 1 else mark.products
        worst = max([worst, *(_relative(a, b, mark.scale) for a, b in zip(ours, ones, strict=True))])
    return worst


def _relative(a: float, b: float, scale: float) -> float:
    return abs(a - b) / scale if math.isfinite(a - b) else math.inf


def _named(node: Node, part: Partition) -> str:
    strategy = part.choice.strategies[node.name]
    return f"{node.operator} of {node.path or 'the model or loss'} ({strategy.output}) at {describe_line(node.line)}"
