"""The first operator of a divided program whose parts are not what one device computes.

All ranks' programs run in lockstep next to the undivided one, on the model's initial values and the same draws. Forward, the first operator
whose value differs is named; if all agree, backward, the last one whose value's gradient does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.graph.choose import Choice
from meshloom.graph.cuts import pieces_of, route_of
from meshloom.graph.lines import describe_line
from meshloom.graph.lockstep import run_in_lockstep
from meshloom.graph.nodes import Node
from meshloom.graph.partition import Partition
from meshloom.graph.pieces import place, take
from meshloom.graph.placement import PARTIAL, Part, Placement
from meshloom.random import preserved_draws, seed_everything

TOLERANCE = 1e-9  # of float64, in which both run; rounding of the deepest families stays below 1e-12
_SEED = 7


def first_difference(part: Partition, model: nn.Module, batch: Any) -> str:
    """One sentence: which operator, at which line of the user's, or that all agree. model: whole, in the program's precision."""
    program = part.choice.layout.program
    whole, parts = _Seen(), _Seen()
    state = {name: each.detach().double() if each.is_floating_point() else each.detach() for name, each in _state(model).items()}
    with preserved_draws():
        seed_everything(_SEED)
        one = program.run(*_split(program, state, None, 0), batch, dtype=torch.float64, visit=whole.note)
        seed_everything(_SEED)
        ranks = range(part.choice.num_ranks)
        split = [_split(program, state, part, rank) for rank in ranks]
        many = run_in_lockstep(part.programs, [each[0] for each in split], [each[1] for each in split], batch, dtype=torch.float64, visit=parts.note)
        _backward([one])
        _backward(many)
    for name in whole.values:
        if name in parts.values and (error := _error(part.choice, name, whole, parts, gradient=False)) > TOLERANCE:
            return f"In lockstep the first operator whose parts differ is {_named(whole.nodes[name], part)}: by {error:.1e}."
    for name in reversed(whole.values):
        if name in parts.values and (error := _error(part.choice, name, whole, parts, gradient=True)) > TOLERANCE:
            return f"In lockstep all values agree; backward, the first gradient that differs is that of {_named(whole.nodes[name], part)}: by {error:.1e}."
    return "In lockstep every operator's parts agree with one device, forward and backward: the ranks' programs are right, and what they send each other is not."


@dataclass
class _Seen:
    """What every operator gave: on one device, or on all ranks."""

    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    values: dict[str, Any] = field(default_factory=dict[str, Any])

    def note(self, node: Node, value: Any) -> None:
        self.nodes[node.name], self.values[node.name] = node, value
        for each in tree_leaves(value):
            if isinstance(each, Tensor) and each.requires_grad:
                each.retain_grad()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _split(program: Any, state: dict[str, Tensor], part: Partition | None, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of one device, or of a rank."""

    def mine(name: str, pieces: Any) -> Tensor:
        return (take(pieces[name], rank, state[name]) if part else state[name]).clone()

    parameters = {name: mine(name, part and part.parameters).requires_grad_(each.meta.requires_grad) for name, each in program.parameters.items()}
    return parameters, {name: mine(name, part and part.buffers) for name in program.buffers}


def _backward(results: Sequence[Any]) -> None:
    losses = [tree_leaves(each)[0] for each in results]
    if all(isinstance(each, Tensor) and each.requires_grad for each in losses):
        torch.autograd.backward([each.sum() for each in losses])


def _error(choice: Choice, name: str, whole: _Seen, parts: _Seen, *, gradient: bool) -> float:
    placement = choice.strategies[name].output
    worst = 0.0
    everyone = [tree_leaves(each) for each in parts.values[name]]
    for number, value in enumerate(tree_leaves(whole.values[name])):
        if not isinstance(value, Tensor) or not value.numel():
            continue
        mine = [each[number] for each in everyone]
        if gradient:
            if value.grad is None:
                continue
            value, mine = value.grad, [each.grad if each.grad is not None else torch.zeros_like(each) for each in mine]
        worst = max(worst, _distance(choice, name, number, placement, value, mine, gradient=gradient))
    return worst


def _distance(choice: Choice, name: str, number: int, placement: Placement, value: Tensor, mine: list[Tensor], *, gradient: bool) -> float:
    if route_of(choice.layout.values[name][number], placement, choice.numbers) is not None:
        return 0.0  # which rows each rank has is not known here; where they are put together again they are compared
    cut = placement.cut if isinstance(placement, Part) else None
    pieces = pieces_of(choice.layout.values[name][number], cut, choice.numbers, choice.num_ranks)
    if isinstance(placement, Part):
        if gradient:
            pairs = [(torch.stack([place(pieces, rank, each) for rank, each in enumerate(mine)]).sum(0), value)]
        else:
            pairs = [(each, take(pieces, rank, value)) for rank, each in enumerate(mine)]
    elif placement == PARTIAL and not gradient:
        pairs = [(torch.stack(mine).sum(0), value)]
    else:
        pairs = [(each, value) for each in mine]
    return max((_relative(one.detach(), other.detach(), value.detach()) for one, other in pairs), default=0.0)


def _relative(one: Tensor, other: Tensor, scale: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point() and not one.is_complex():
        return 0.0 if torch.equal(one, other) else float("inf")
    same = (one == other) | (one.isnan() & other.isnan())
    size = scale.abs()[scale.isfinite()].max() if bool(scale.isfinite().any()) else torch.tensor(0.0)
    return float(torch.where(same, torch.zeros_like(one), one - other).abs().max()) / (1.0 + float(size)) if one.numel() else 0.0


def _named(node: Node, part: Partition) -> str:
    strategy = part.choice.strategies[node.name]
    return f"{node.operator} of {node.path or 'the model or loss'} ({strategy.output}) at {describe_line(node.line)}"
