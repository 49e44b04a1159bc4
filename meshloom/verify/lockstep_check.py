"""The first operator of a partitioned program whose shards differ from what one device computes.

The unpartitioned program runs, then all ranks' programs as simulated ranks, on the model's initial values and the
same draws. In the forward, the first operator whose value differs is named; if all agree, in the backward the
last one whose gradient differs, and the operators whose backward returns it; if these agree, too, the first parameter whose gradient
differs on some rank, after the sums that ranks make once a step.

No value is kept for the comparison. Each value, and its gradient, is reduced to one number: its inner product
with a random tensor seeded by its name. It is linear, so the ranks' shards, each with its part of the random
tensor, add up to the reference's; and different values almost surely have different numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces, take
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.moments.current_step import at_step
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.ir.lines import describe_line
from meshloom.program.ir.nodes import Node, users_by_value
from meshloom.program.ir.program import Program
from meshloom.program.opaque.bound import bound
from meshloom.program.run.execute import run_program
from meshloom.tensor_parallel.layout.cuts import pieces_of, route_of
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part, cut_of
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.search.choose import DivisionChoice

TOLERANCE = 1e-9  # both run in float64; rounding of the deepest models stays below 1e-12
Found = tuple[str, str]  # of `first_wrong_operator`
_NO_MODULE = "the model or loss"
Products = dict[int, list[float]]  # number of a tensor in a value -> one device's, or one of each rank
AGREE = (
    "In lockstep, on the initial values and a chunk of the first batch, every operator's shards agree with one device, forward and backward: what differs shows "
    "with other values or data, in gradients of parameters and their sums over ranks, in how ranks run their programs, or in what they send each other."
)
_SEED = 7


def first_wrong_operator(part: Partition, model: nn.Module, batch: Any) -> Found:
    """One sentence: the operator and the user's line, or that all agree; and the module of what is wrong first, "" if nothing is. model: unsharded, in
    the program's precision."""
    program = bound(part.choice.layout.program, model)
    state = {
        name: each.detach().double() if each.is_floating_point() else each.detach()
        for name, each in (*model.named_parameters(), *model.named_buffers())
    }
    reference, ranks = _InnerProducts(part.choice, 1), _InnerProducts(part.choice, part.choice.num_ranks)

    def run(program: Program, found: _InnerProducts, rank: int | None, group: Group | None) -> None:
        own = _split(program, state, part, rank)
        seed_everything(_SEED)
        with at_step(0):
            visit = partial(found.note, rank)
            returned = run_program(program, *own, batch, dtype=torch.float64, visit=visit, group=group)
        loss = tree_leaves(returned)[0]
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.sum().backward()

    with preserved_draws():
        run(program, reference, None, None)
        groups = simulated_groups(part.choice.num_ranks)
        programs = [bound(each, model) for each in part.programs]
        of_ranks = enumerate(zip(programs, groups, strict=True))
        in_turns([partial(run, each, ranks, rank, group) for rank, (each, group) in of_ranks])
    return _of_values(reference, ranks, part) or _of_gradients(reference, ranks, part) or (AGREE, "")


def _of_values(reference: _InnerProducts, ranks: _InnerProducts, part: Partition) -> Found | None:
    """The first value that differs."""
    for name, error in reference.errors(ranks, backward=False):
        if error > TOLERANCE:
            node = reference.nodes[name]
            said = (
                f"In lockstep the first operator whose shards differ is {_named(node, part)}: by {error:.1e}."
            )
            return said, node.path or _NO_MODULE
    return None


def _of_gradients(reference: _InnerProducts, ranks: _InnerProducts, part: Partition) -> Found | None:
    """The last value whose gradient differs, with the last of a module: where the loss's own backward is wrong, gradients of modules
    are from there on."""
    errors = dict(reference.errors(ranks, backward=True))
    wrong = {name: errors[name] for name in reversed(errors) if errors[name] > TOLERANCE}
    if not wrong:
        return None
    first = next(iter(wrong))
    readers = users_by_value(reference.nodes.values()).get(first, [])
    by = " and of ".join(_named(each, part) for each in readers[:3])
    back = f" It is what the backward of {by} returns." if readers else ""
    sentence = f"In lockstep all values agree; backward, the first gradient that differs is that of {_named(reference.nodes[first], part)}: by {wrong[first]:.1e}.{back}"
    return sentence, next((path for name in wrong if (path := reference.nodes[name].path)), _NO_MODULE)


class _InnerProducts:
    """The inner products of each operator's value, and of its gradient: one device's, or those of `size` ranks, by whether they are gradients, and
    name. scales: of one device's tensors, likewise, and by number."""

    def __init__(self, choice: DivisionChoice, size: int) -> None:
        self.nodes: dict[str, Node] = {}
        self.found: dict[tuple[bool, str], Products] = {}
        self.scales: dict[tuple[bool, str, int], float] = {}
        self._choice, self._size = choice, size

    def note(self, rank: int | None, node: Node, value: Any) -> None:
        """Reduce a value of a rank; None: of one device."""
        if node.name not in self._choice.layout.values:
            return  # part of a resharding, which one device does not have
        self.nodes[node.name] = node
        for backward in (False, True):
            self.found.setdefault((backward, node.name), {})
        for number, each in enumerate(tree_leaves(value)):
            if isinstance(each, Tensor):
                self._note(rank, node.name, number, each)

    def errors(self, ranks: _InnerProducts, *, backward: bool) -> Iterator[tuple[str, float]]:
        """Of each value that ranks have, the largest difference, relative to the tensor's scale."""
        for name in [each for each in self.nodes if each in ranks.nodes]:
            placement = self._choice.strategies[name].output
            adds_up = isinstance(placement, Part) or (placement == PARTIAL and not backward)
            error = 0.0
            for number, (right,) in self.found[backward, name].items():
                found = ranks.found[backward, name].get(number, [0.0])  # no rank has a gradient
                for each in [sum(found)] if adds_up else found:
                    off = abs(each - right) / self.scales[backward, name, number]
                    error = max(error, off if math.isfinite(off) else math.inf)
            yield name, error

    def _note(self, rank: int | None, name: str, number: int, value: Tensor) -> None:
        choice, placement = self._choice, self._choice.strategies[name].output
        axes = choice.layout.values[name][number]
        if route_of(axes, placement, choice.numbers) is not None:
            return  # its rows are not known statically, and are compared where they are combined again
        pieces = pieces_of(axes, cut_of(placement), choice.numbers, choice.num_ranks)
        if not math.prod(pieces.shape):
            return
        is_part = isinstance(placement, Part)

        def note(backward: bool, holders: Sequence[int], tensor: Tensor) -> None:
            """holders: ranks whose parts are added up; none: all of the tensor counts once."""
            probe, whole = _probe(name, number, pieces.shape), rank is None
            parts = [
                (take(pieces, each, tensor) if whole else tensor, take(pieces, each, probe))
                for each in holders
            ]
            products = self.found[backward, name].setdefault(number, [0.0] * self._size)
            products[rank or 0] = sum(_product(*each) for each in parts or [(tensor, probe)])
            if whole:
                self.scales[backward, name, number] = _scale(tensor)

        own = [rank] if is_part and rank is not None else []
        # several ranks may have an element
        note(False, range(choice.num_ranks) if is_part and rank is None else own, value)
        if value.requires_grad:
            # of a piece of a split that nothing uses it is none
            value.register_hook(lambda gradient: note(True, own, gradient) if gradient is not None else None)


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
    program: Program, state: dict[str, Tensor], part: Partition, rank: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, which share memory with `state`, and buffers: of the reference, or of a rank."""

    def shards(name: str, pieces: Mapping[str, Pieces]) -> Tensor:
        return (state[name] if rank is None else take(pieces[name], rank, state[name])).detach()

    parameters = {
        name: shards(name, part.parameters).requires_grad_(each.meta.requires_grad)
        for name, each in program.parameters.items()
    }
    return parameters, {name: shards(name, part.buffers).clone() for name in program.buffers}


def _named(node: Node, part: Partition) -> str:
    strategy = part.choice.strategies[node.name]
    return f"{node.operator} of {node.path or _NO_MODULE} ({strategy.output}) at {describe_line(node.line)}"
