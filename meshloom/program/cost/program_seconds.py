"""Predicted seconds of a program's operators: forward, backward, and the deferrable part of the backward.

By a machine's measured curves each operator takes what its kind and work do, and a program takes their sum.
Schedules that split the backward compute gradients of weights when there is nothing else to do. This works
for linear layers whose weights are parameters; the backward of other operators cannot be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from meshloom.machine.machine import COUNTED_IN_FLOPS, Kind, Machine, operator_seconds
from meshloom.program.cost.cost import Cost
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program

aten = torch.ops.aten

# Operators by the first part of their name; others are matrix products if they have FLOPs, else elementwise.
_NAMES: Mapping[Kind, str] = {
    "attention": "scaled_dot_product_attention",
    "convolution": "conv1d conv2d conv3d convolution _convolution "
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    "activation": "gelu silu sigmoid tanh exp expm1 log log1p log_sigmoid logsumexp softplus mish elu celu selu "
    "hardswish pow erf sin cos",
    "normalization": "layer_norm rms_norm group_norm batch_norm instance_norm native_layer_norm _fused_rms_norm",
    "softmax": "softmax log_softmax _softmax _log_softmax cross_entropy_loss nll_loss nll_loss_nd nll_loss2d "
    "cumsum sort topk",
    "reduction": "sum mean amax amin max min norm var std any all argmax linalg_vector_norm prod",
    "gather": "embedding embedding_bag index index_select gather scatter scatter_add index_put index_add take "
    "one_hot",
    "draw": "dropout native_dropout feature_dropout alpha_dropout bernoulli rand randn rand_like randn_like "
    "multinomial",
}
KIND_OF: Mapping[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted time of a forward and of its backward. later: the part of `backward` for gradients of weights.

    >>> Seconds(forward=1.0, backward=2.0, later=1.0).total
    3.0
    """

    forward: float = 0.0
    backward: float = 0.0
    later: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def program_seconds(program: Program, costs: Mapping[str, Cost], machine: Machine) -> Seconds:
    """Seconds of one chunk on one device, without optimizer and exchange."""
    forward = backward = 0.0
    for node in program.nodes:
        seconds = node_seconds(node, costs[node.name], machine)
        forward, backward = forward + seconds.forward, backward + seconds.backward
    return Seconds(forward=forward, backward=backward)


def node_seconds(node: Node, cost: Cost, machine: Machine) -> Seconds:
    """Seconds of one operator: those of a call if it moves no bytes; no backward without a gradient."""
    kind = kind_of(node, cost)
    dtype = str(node.outputs[0].dtype).removeprefix("torch.") if node.outputs else "float32"
    forward_bytes = cost.read_bytes + cost.written_bytes
    backward_bytes = cost.backward_read_bytes + cost.backward_written_bytes
    forward, backward = machine.call_seconds, 0.0
    if forward_bytes or cost.flops:
        forward = operator_seconds(machine, kind, dtype, flops=cost.flops, num_bytes=forward_bytes)
    if backward_bytes or cost.backward_flops:
        backward = operator_seconds(
            machine, kind, dtype, flops=cost.backward_flops, num_bytes=backward_bytes, backward=True
        )
    elif any(each.requires_grad for each in node.outputs):
        backward = machine.backward_call_seconds
    return Seconds(forward=forward, backward=backward)


def kind_of(node: Node, cost: Cost) -> Kind:
    """The kind of an operator, which selects its curve."""
    name = node.operator if node.operator != "out_of_place" else str(node.args[0]).removeprefix("aten.")
    name = name.partition(".")[0]
    kind = KIND_OF.get(name, KIND_OF.get(name.removesuffix("_"), "elementwise"))
    if cost.flops and kind not in COUNTED_IN_FLOPS:
        return "matmul"
    return kind if cost.flops or kind not in COUNTED_IN_FLOPS else "elementwise"


def work_of(program: Program, costs: Mapping[str, Cost], rates: Rates) -> dict[str, Seconds]:
    """Node -> its seconds for one microbatch: by the machine's measured curves, if any, or else by `rates`.

    Half of a linear layer's backward is its weights' gradient: both halves multiply as much. If its input
    requires no grad, all of it is.
    """
    graded = {node.name for node in program.nodes if any(each.requires_grad for each in node.outputs)}
    waiting = weights_that_wait(program)
    found: dict[str, Seconds] = {}
    for node in program.nodes:
        cost = costs[node.name]
        if rates.machine is not None:
            seconds = node_seconds(node, cost, rates.machine)
        else:
            seconds = Seconds(forward=rates.forward_seconds(cost), backward=rates.backward_seconds(cost))
        if node.name in waiting:
            share = 0.5 if next(node.operands()).name in graded else 1.0
            seconds = replace(seconds, later=share * seconds.backward)
        found[node.name] = seconds
    return found


def with_seconds_of_recomputation(
    work: Mapping[str, Seconds], seconds: Mapping[str, float]
) -> dict[str, Seconds]:
    """The same with recomputation added to the backward. seconds: node -> seconds of recomputing it."""
    return {
        name: replace(each, backward=each.backward + seconds.get(name, 0.0)) for name, each in work.items()
    }


def weights_that_wait(program: Program) -> frozenset[str]:
    """Nodes whose weight gradients can be computed later: linear layers of parameters, without autocast."""
    parameters = {each.value for each in program.parameters.values() if each.meta.requires_grad}
    return frozenset(node.name for node in program.nodes if _waits(node, parameters))


def _waits(node: Node, parameters: set[str]) -> bool:
    if node.target is not aten.linear.default or node.kwargs:
        return False
    if not node.context.grad or any(each.enabled for each in node.context.autocast):
        return False
    weights = [each for each in node.args[1:] if each is not None]
    return all(isinstance(each, Ref) and each.name in parameters for each in weights)
