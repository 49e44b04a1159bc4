"""Predicted seconds of a program on a machine: the sum over its operators, each by its kind and work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshloom.machine.machine import COUNTED_IN_FLOPS, Kind, Machine, operator_seconds
from meshloom.program.cost.cost import Cost
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program

# Operators by the first part of their name; others are matrix products if they have FLOPs, else elementwise.
_NAMES: Mapping[Kind, frozenset[str]] = {
    "attention": frozenset({"scaled_dot_product_attention"}),
    "convolution": frozenset(
        {
            "conv1d",
            "conv2d",
            "conv3d",
            "convolution",
            "_convolution",
            "conv_transpose1d",
            "conv_transpose2d",
            "conv_transpose3d",
        }
    ),
    "activation": frozenset(
        {
            "gelu",
            "silu",
            "sigmoid",
            "tanh",
            "exp",
            "log",
            "log1p",
            "softplus",
            "mish",
            "elu",
            "celu",
            "selu",
            "pow",
            "erf",
            "sin",
            "cos",
        }
        | {"hardswish", "log_sigmoid", "logsumexp", "expm1"}
    ),
    "normalization": frozenset(
        {
            "layer_norm",
            "rms_norm",
            "group_norm",
            "batch_norm",
            "instance_norm",
            "native_layer_norm",
            "_fused_rms_norm",
        }
    ),
    "softmax": frozenset(
        {
            "softmax",
            "log_softmax",
            "_softmax",
            "_log_softmax",
            "cross_entropy_loss",
            "nll_loss",
            "nll_loss_nd",
            "nll_loss2d",
            "cumsum",
            "sort",
            "topk",
        }
    ),
    "reduction": frozenset(
        {
            "sum",
            "mean",
            "amax",
            "amin",
            "max",
            "min",
            "norm",
            "var",
            "std",
            "any",
            "all",
            "argmax",
            "linalg_vector_norm",
            "prod",
        }
    ),
    "gather": frozenset(
        {
            "embedding",
            "embedding_bag",
            "index",
            "index_select",
            "gather",
            "scatter",
            "scatter_add",
            "index_put",
            "index_add",
            "take",
            "one_hot",
        }
    ),
    "draw": frozenset(
        {
            "dropout",
            "native_dropout",
            "feature_dropout",
            "alpha_dropout",
            "bernoulli",
            "rand",
            "randn",
            "rand_like",
            "randn_like",
            "multinomial",
        }
    ),
}
KIND_OF: Mapping[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names}


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted time of a forward and of its backward.

    >>> Seconds(forward=1.0, backward=2.0).total
    3.0
    """

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def program_seconds(program: Program, costs: Mapping[str, Cost], machine: Machine) -> Seconds:
    """Seconds of one chunk on one device, without optimizer and exchange."""
    return sum_of(node_seconds(node, costs[node.name], machine) for node in program.nodes)


def sum_of(parts: Iterable[Seconds]) -> Seconds:
    """The sum of seconds."""
    forward = backward = 0.0
    for each in parts:
        forward += each.forward
        backward += each.backward
    return Seconds(forward=forward, backward=backward)


def node_seconds(node: Node, cost: Cost, machine: Machine) -> Seconds:
    """Seconds of one operator: those of a call if it moves no bytes; no backward without a gradient."""
    kind = kind_of(node, cost)
    dtype = str(node.outputs[0].dtype).removeprefix("torch.") if node.outputs else "float32"
    forward_bytes, backward_bytes = (
        cost.read_bytes + cost.written_bytes,
        cost.backward_read_bytes + cost.backward_written_bytes,
    )
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
