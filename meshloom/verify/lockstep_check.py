"""The first operator of a partitioned program whose shards differ from what one device computes.

The unpartitioned program runs, then all ranks' programs in lockstep, on the model's initial values and the
same draws. In the forward, the first operator whose value differs is named; if all agree, in the backward the
last one whose gradient differs, and the operators whose backward returns it; if these agree, too, the first parameter whose gradient
differs on some rank, after the sums that ranks make once a step.

No value is kept for the comparison. Each value, and its gradient, is reduced to one number: its inner product
with a random tensor seeded by its name. It is linear, so the ranks' shards, each with its part of the random
tensor, add up to the reference's; and different values almost surely have different numbers.
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

from meshloom.comm.pieces import take
from meshloom.core.moments.current_step import at_step
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.ir.lines import describe_line
from meshloom.program.ir.nodes import Node, users_by_value
from meshloom.program.opaque.bound import bound
from meshloom.program.run.execute import run_program
from meshloom.tensor_parallel.layout.cuts import pieces_of, route_of
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part, cut_of
from meshloom.tensor_parallel.lockstep import run_in_lockstep
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.search.choose import DivisionChoice

TOLERANCE = 1e-9  # both run in float64; rounding of the deepest models stays below 1e-12
Found = tuple[str, str]  # of `first_wrong_operator`
_NO_MODULE = "the model or loss"
# number of a tensor -> what is one number of one device's, or one of each rank, and the tensor's scale
Products = dict[int, tuple[list[float], float]]
AGREE = (
    "In lockstep, on the initial values and a chunk of the first batch, every operator's shards agree with one device, forward and backward: what differs shows "
    "with other values or data, in gradients of parameters and their sums over ranks, in how ranks run their programs, or in what they send each other."
)
_SEED = 7


def first_wrong_operator(part: Partition, model: nn.Module, batch: Any) -> Found:
    """One sentence: the operator and the user's line, or that all agree; and the module of what is wrong first, "" if nothing is. model: unsharded, in
    the program's precision."""
    program = bound(part.choice.layout.program, model)
    programs = [bound(each, model) for each in part.programs]
    state = {
        name: each.detach().double() if each.is_floating_point() else each.detach()
        for name, each in (*model.named_parameters(), *model.named_buffers())
    }
    reference, ranks = _InnerProducts(part.choice), _InnerProducts(part.choice)
    with preserved_draws(), at_step(0):
        seed_everything(_SEED)
        own = _split(program, state, None, 0)
        one = run_program(
            program, *own, batch, dtype=torch.float64, visit=lambda *each: reference.note(each[0], each[1:])
        )
        _backward([one])
        del one
        seed_everything(_SEED)
        split = [_split(program, state, part, rank) for rank in range(part.choice.num_ranks)]
        _backward(
            run_in_lockstep(
                programs, [each[0] for each in split], [each[1] for each in split], batch,
                dtype=torch.float64, visit=ranks.note
            )
        )  # fmt: skip
    return _of_values(reference, ranks, part) or _of_gradients(reference, ranks, part) or (AGREE, "")


def _of_values(reference: _InnerProducts, ranks: _InnerProducts, part: Partition) -> Found | None:
    """The first value that differs."""
    for name, values in reference.values.items():
        if name in ranks.nodes and (error := _error(values, ranks.values[name])) > TOLERANCE:
            node = reference.nodes[name]
            said = (
                f"In lockstep the first operator whose shards differ is {_named(node, part)}: by {error:.1e}."
            )
            return said, node.path or _NO_MODULE
    return None


def _of_gradients(reference: _InnerProducts, ranks: _InnerProducts, part: Partition) -> Found | None:
    """The last value whose gradient differs, with the last of a module: where the loss's own backward is wrong, gradients of modules
    are from there on."""
    wrong = {
        name: error
        for name in reversed(reference.nodes)
        if name in ranks.nodes
        and (error := _error(reference.gradients[name], ranks.gradients[name])) > TOLERANCE
    }
    if not wrong:
        return None
    first = next(iter(wrong))
    readers = users_by_value(reference.nodes.values()).get(first, [])
    by = " and of ".join(_named(each, part) for each in readers[:3])
    back = f" It is what the backward of {by} returns." if readers else ""
    sentence = f"In lockstep all values agree; backward, the first gradient that differs is that of {_named(reference.nodes[first], part)}: by {wrong[first]:.1e}.{back}"
    return sentence, next((path for name in wrong if (path := reference.nodes[name].path)), _NO_MODULE)


@dataclass
class _InnerProducts:
    """The inner products of each operator's value, and of its gradient, by the tensor's number in the value: one device's, or all ranks'. With each the
    tensor's scale, of one device."""

    choice: DivisionChoice
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    values: dict[str, Products] = field(default_factory=dict[str, Products])
    gradients: dict[str, Products] = field(default_factory=dict[str, Products])

    def note(self, node: Node, results: Sequence[Any]) -> None:
        """Reduce a value: one device's, or that of all ranks."""
        if node.name not in self.choice.layout.values:
            return  # part of a resharding, which one device does not have
        self.nodes[node.name] = node
        self.values[node.name], self.gradients[node.name] = {}, {}
        for number, shards in enumerate(zip(*map(tree_leaves, results), strict=True)):
            if all(isinstance(each, Tensor) for each in shards):
                self._note(node.name, number, shards)

    def _note(self, name: str, number: int, shards: Sequence[Tensor]) -> None:
        choice, placement, is_one = self.choice, self.choice.strategies[name].output, len(shards) == 1
        axes, is_part = choice.layout.values[name][number], isinstance(placement, Part)
        if route_of(axes, placement, choice.numbers) is not None:
            return  # its rows are not known statically, and are compared where they are combined again
        pieces = pieces_of(axes, cut_of(placement), choice.numbers, choice.num_ranks)
        if not math.prod(pieces.shape):
            return

        def product(rank: int | None, value: Tensor) -> float:
            probe = _probe(name, number, pieces.shape)
            return _product(value, take(pieces, rank, probe) if is_part and rank is not None else probe)

        def hook(rank: int, gradient: Tensor | None) -> None:
            if gradient is not None:  # as it is of a piece of a split that nothing uses
                of_ranks[rank] = product(None if is_one else rank, gradient)
                found = [sum(of_ranks)] if is_part else [*of_ranks]
                self.gradients[name][number] = found, _scale(gradient) if is_one else 0.0

        # several ranks may have an element
        parts = (
            [take(pieces, rank, shards[0]) for rank in range(choice.num_ranks)]
            if is_one and is_part
            else shards
        )
        products = [product(rank, each) for rank, each in enumerate(parts)]
        found = [sum(products)] if is_part or placement == PARTIAL else products
        self.values[name][number] = found, _scale(shards[0]) if is_one else 0.0
        of_ranks = [0.0] * len(shards)
        for rank, each in enumerate(shards):
            if each.requires_grad:
                each.register_hook(partial(hook, rank))


def _probe(name: str, number: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(derive(_SEED, name, number))
    return torch.empty(tuple(shape), dtype=torch.float64).uniform_(-1, 1, generator=generator)


def _product(value: Tensor, probe: Tensor) -> float:
    """<value, probe>; of complex numbers, the real plus twice the imaginary part. NaN if the shapes
    differ."""
    if value.shape != probe.shape:
        return math.nan
    detached = value.detach()
    if detached.is_complex():
        return _product(detached.real, probe) + 2 * _product(detached.imag, probe)
    # non-finite elements become numbers that tell them apart
    finite = torch.nan_to_num(detached.double(), 1.5, 2.5, -3.5)
    return float((finite * probe.to(detached.device)).sum())


def _scale(value: Tensor) -> float:
    detached = value.detach()
    sizes = (detached if detached.is_complex() else detached.double()).abs().double()
    largest = torch.nan_to_num(sizes, 0.0, 0.0, 0.0).max() if sizes.numel() else 0.0
    return (1 + float(largest)) * math.sqrt(max(value.numel(), 1))


def _split(
    program: Any, state: dict[str, Tensor], part: Partition | None, rank: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, which share memory with `state`, and buffers: of the reference, or of a rank."""

    def shards(name: str, pieces: Any) -> Tensor:
        return (take(pieces[name], rank, state[name]) if part else state[name]).detach()

    parameters = {
        name: shards(name, part and part.parameters).requires_grad_(each.meta.requires_grad)
        for name, each in program.parameters.items()
    }
    return parameters, {name: shards(name, part and part.buffers).clone() for name in program.buffers}


def _backward(results: Sequence[Any]) -> None:
    losses = [tree_leaves(each)[0] for each in results]
    if all(isinstance(each, Tensor) and each.requires_grad for each in losses):
        torch.autograd.backward([each.sum() for each in losses])


def _error(reference: Products, ranks: Products) -> float:
    """The largest, relative to the tensor's scale."""
    errors = [0.0]
    for number, ((right,), scale) in reference.items():
        ours, _ = ranks.get(number, ([0.0], 0.0))  # no rank has a gradient
        errors += [abs(each - right) / scale if math.isfinite(each - right) else math.inf for each in ours]
    return max(errors)


def _named(node: Node, part: Partition) -> str:
    strategy = part.choice.strategies[node.name]
    return f"{node.operator} of {node.path or _NO_MODULE} ({strategy.output}) at {describe_line(node.line)}"
