"""Seconds of every operator of a program: forward, backward, and the deferrable part of the backward.

Schedules that split the backward compute gradients of weights when there is nothing else to do. This works
for linear layers whose weights are parameters; the backward of other operators cannot be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from meshloom.program.cost.cost import Cost
from meshloom.program.cost.program_seconds import node_seconds
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class OperatorSeconds:
    """Of one operator and one microbatch. later: the part of `backward` that computes gradients of weights.

    >>> OperatorSeconds(forward=1.0, backward=2.0, later=1.0).total
    3.0
    """

    forward: float = 0.0
    backward: float = 0.0
    later: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def work_of(program: Program, costs: Mapping[str, Cost], rates: Rates) -> dict[str, OperatorSeconds]:
    """Node -> its seconds: by the machine's measured curves, if any, or else by these rates."""
    if rates.machine is None:
        return with_later(
            program,
            {node.name: rates.forward_and_backward_seconds(costs[node.name]) for node in program.nodes},
        )
    measured = {node.name: node_seconds(node, costs[node.name], rates.machine) for node in program.nodes}
    return with_later(program, {name: (each.forward, each.backward) for name, each in measured.items()})


def with_later(program: Program, seconds: Mapping[str, tuple[float, float]]) -> dict[str, OperatorSeconds]:
    """Node -> its seconds. seconds: forward and backward of each.

    Half of a linear layer's backward is its weights' gradient: both halves multiply as much. If its input
    requires no grad, all of it is.
    """
    needing = {node.name for node in program.nodes if any(each.requires_grad for each in node.outputs)}
    waiting = weights_that_wait(program)
    found: dict[str, OperatorSeconds] = {}
    for node in program.nodes:
        forward, backward = seconds[node.name]
        share = 0.0
        if node.name in waiting:
            first = next(node.operands()).name
            share = 0.5 if first in needing else 1.0
        found[node.name] = OperatorSeconds(forward=forward, backward=backward, later=share * backward)
    return found


def computed_again(
    work: Mapping[str, OperatorSeconds], seconds: Mapping[str, float]
) -> dict[str, OperatorSeconds]:
    """The same with recomputation added to the backward. seconds: node -> seconds of recomputing it."""
    return {
        name: replace(each, backward=each.backward + seconds.get(name, 0.0)) for name, each in work.items()
    }


def weights_that_wait(program: Program) -> frozenset[str]:
    """Nodes whose weight gradients can be computed later: linear layers of parameters, without autocast."""
    parameters = {each.value for each in program.parameters.values() if each.meta.requires_grad}
    return frozenset(node.name for node in program.nodes if _waits(node, parameters))


def _waits(node: Node, parameters: set[str]) -> bool:
    if (
        node.target is not aten.linear.default
        or node.kwargs
        or not node.context.grad
        or any(each.enabled for each in node.context.autocast)
    ):
        return False
    weights = [each for each in node.args[1:] if each is not None]
    return all(isinstance(each, Ref) and each.name in parameters for each in weights)
