"""Casts of parameters that compiled code makes anew in backward, instead of keeping them until then.

Of a linear layer under autocast torch's compiler keeps the weight in the lower precision, as eager does. Where a rank has
parameters for a unit at a time (zero=3), that would be half of the model on every rank; what is kept is the parameter
instead, which is gathered for backward anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

_aten, _prims = torch.ops.aten, torch.ops.prims
_CASTS = {_aten._to_copy.default, _prims.convert_element_type.default}
_VIEWS = {
    _aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten.reshape.default,
    _aten.unsqueeze.default, _aten.expand.default,
}  # fmt: skip


class RecomputedCasts(CustomGraphPass):
    """Marks them in the graph of forward and backward, before it is parted. inputs: of the compiled function."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._parameters = {
            f"primals_{number + 1}": tuple(each.shape)
            for number, each in enumerate(inputs)
            if isinstance(each, nn.Parameter)
        }

    def __call__(self, graph: fx.Graph) -> None:
        marked: set[fx.Node] = set()
        for node in graph.nodes:
            operand: Any = node.args[0] if node.args else None
            is_cast = node.target in _CASTS and self._is_parameter(operand)
            if is_cast or (node.target in _VIEWS and operand in marked):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                marked.add(node)

    def uuid(self) -> Any:
        """What compiled code is kept by."""
        return get_hash_for_files((__file__,)), tuple(sorted(self._parameters.items()))

    def _is_parameter(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or node.op != "placeholder" or node.name not in self._parameters:
            return False
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and tuple(value.shape) == self._parameters[node.name]
