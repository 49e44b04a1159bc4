"""The operator of a leaf's call: by shapes here, by running the module once `bound.py` has found it.

    results = leaf(inputs, state, path, call)        state: the module's parameters and buffers

Without values (to infer shapes, to count costs) it returns tensors of the recorded layouts, and its backward
gradients of its operands' shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.opaque.call import OpaqueCall

_library = torch.library.Library("meshloom", "FRAGMENT")
_library.define("leaf(Tensor[] inputs, Tensor[] state, str path, str call) -> Tensor[]")
_library.define("leaf_backward(Tensor[] gradients, Tensor[] kept, Tensor[] wanted, str call) -> Tensor[]")

_ops: Any = torch.ops
OPAQUE, OPAQUE_BACKWARD = _ops.meshloom.leaf.default, _ops.meshloom.leaf_backward.default


def is_opaque(node: Node) -> bool:
    """Whether a node is a call of an opaque module."""
    return node.target is OPAQUE or hasattr(node.target, "opaque_call")


def call_of_node(node: Node) -> OpaqueCall:
    """The call of an opaque node."""
    return OpaqueCall.of(node.args[3])


def trained_writes(program: Program) -> list[str]:
    """The trained parameters that opaque modules of a program write."""
    found: dict[str, None] = {}
    for node in filter(is_opaque, program.nodes):
        path, call = node.args[2], call_of_node(node)
        names = (call.state[number][0] for number in call.trained_writes)
        found |= dict.fromkeys(f"{path}.{name}" if path else name for name in names)
    return list(found)


def _device(*tensors: Sequence[Tensor]) -> torch.device:
    return next((each.device for several in tensors for each in several), torch.device("cpu"))


def _results(inputs: Sequence[Tensor], state: Sequence[Tensor], path: str, call: str) -> list[Tensor]:
    device = _device(inputs, state)
    return [
        torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=device)
        for each in OpaqueCall.of(call).results
    ]


def _without_module(inputs: Any, state: Any, path: str, call: str) -> Any:
    raise RuntimeError(f"{path or 'the model'} is an opaque part, which runs where its module is")


def _gradients(gradients: Any, kept: Any, wanted: Sequence[Tensor], call: str) -> list[Tensor]:
    return [torch.empty_like(each) for each in wanted]


def _kept(inputs: Sequence[Tensor], num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=_device(inputs))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given, state, _, text = inputs
    call = OpaqueCall.of(text)
    ctx.call, ctx.num_given, ctx.num_state = text, len(given), len(state)
    ctx.wanted = [number for number, each in enumerate((*given, *state)) if each.requires_grad]
    ctx.shapes = [(each.shape, each.dtype, each.device) for each in (*given, *state) if each.requires_grad]
    inside = [_kept(given or state, call.cost.saved_bytes)] if call.cost.saved_bytes else []
    ctx.save_for_backward(*(given[number] for number in call.cost.saved_inputs), *inside)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    wanted = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
    arrived = [each for each in gradients if each is not None]
    found = dict(
        zip(ctx.wanted, OPAQUE_BACKWARD(arrived, list(ctx.saved_tensors), wanted, ctx.call), strict=True)
    )
    every = [found.get(number) for number in range(ctx.num_given + ctx.num_state)]
    return every[: ctx.num_given], every[ctx.num_given :], None, None


torch.library.register_fake("meshloom::leaf", _results, lib=_library)
torch.library.register_fake("meshloom::leaf_backward", _gradients, lib=_library)
_library.impl("leaf", _without_module, "CompositeExplicitAutograd")
torch.library.register_autograd("meshloom::leaf", _backward, setup_context=_setup, lib=_library)
