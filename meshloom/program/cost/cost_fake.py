"""Runs a program's step on fake tensors, with autograd and without memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshloom.program.ir.contexts import Entered
from meshloom.program.ir.nodes import Meta, Node, Ref, last_uses
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import empty_like
from meshloom.program.trace.on_cpu import AsOnCPU, fake_mode

_torch: Any = torch  # for private names


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors created inside have no values; gradients are recorded."""
    with torch.enable_grad(), fake_mode(), AsOnCPU():
        yield


def fake_parameters(program: Program) -> dict[str, Tensor]:
    """User's name -> a fake parameter."""
    return {
        name: torch.nn.Parameter(_like(each.meta, program.device), each.meta.requires_grad)
        for name, each in program.parameters.items()
    }


def fake_buffers(program: Program) -> dict[str, Tensor]:
    """User's name -> a fake buffer."""
    return {name: _like(each.meta, program.device) for name, each in program.buffers.items()}


def fake_inputs(program: Program) -> list[Tensor]:
    """Fake tensors of the batch, in order."""
    return [_like(each.meta, program.device) for each in program.inputs]


def fake_constants(program: Program) -> dict[str, Tensor]:
    """Value -> a fake constant."""
    return {name: empty_like(each, program.device) for name, each in program.constants.items()}


def leaves(
    program: Program, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: list[Tensor]
) -> dict[str, Tensor]:
    """Name of the value -> tensor, for all inputs of a program."""
    values = {each.value: parameters[name] for name, each in program.parameters.items()}
    values |= {each.value: buffers[name] for name, each in program.buffers.items()}
    values |= {each.value: tensor for each, tensor in zip(program.inputs, inputs, strict=True)}
    return values | fake_constants(program)


def run_nodes(program: Program, values: dict[str, Any], *, keep: bool) -> Iterator[Node]:
    """Run node by node inside `fake_tensors`; yields each node when its value is in `values`.

    keep: leave values there after their last use. Parameters, inputs and outputs always stay.
    """
    contexts = program.contexts
    number = {context: index for index, context in enumerate(contexts)}
    of_nodes = {node.name for node in program.nodes}
    dying = {} if keep else last_uses(program.nodes, (program.outputs, tuple(program.updates.values())))
    with Entered(contexts, device=program.device.type) as entered:
        for node in program.nodes:
            entered.move_to(number[node.context])
            args, kwargs = tree_map_only(Ref, lambda ref: values[ref.name], (node.args, dict(node.kwargs)))
            values[node.name] = node.target(*args, **kwargs)
            del args, kwargs
            for name in dying.get(node.name, ()):
                if name in of_nodes:
                    del values[name]
            yield node


def next_number() -> int:
    """The sequence number of autograd's next node."""
    return _torch.autograd._get_sequence_nr()


def number_here() -> int | None:
    """Sequence number of the autograd node whose backward runs; None while gradients are accumulated."""
    node = _torch._C._current_autograd_node()
    number = node._sequence_nr() if node is not None else None
    return None if number is None or number >= 2**63 else number


def _device_asked(func: Any, args: Sequence[Any]) -> torch.device | None:
    """The device, if this call only queries a fake tensor's device, as autograd does for every operator."""
    asked = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
    return args[0].fake_device if asked else None


class Calls(TorchDispatchMode):
    """Is told of each ATen call that computes on fake tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (device := _device_asked(func, args)) is not None:
            return device
        value = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # no query, such as the device
            self.called(func, args, kwargs or {}, value)
        return value

    @abstractmethod
    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        """Of one call, and of its result."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an operator's result or arguments."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def loss_of(program: Program, values: Mapping[str, Any]) -> Tensor | None:
    """The start of the backward: the sum of the first output, if it requires grad."""
    first = program.outputs[0] if program.outputs else None
    value = values.get(first.name) if isinstance(first, Ref) else None
    return value.sum() if isinstance(value, Tensor) and value.requires_grad else None


def run_backward(loss: Tensor | None) -> None:
    """The backward from `loss_of`. A user's search for NaN in backwards would read values, and there are none."""
    if loss is not None:
        with torch.autograd.set_detect_anomaly(False):
            loss.backward()


def _like(meta: Meta, device: torch.device) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
