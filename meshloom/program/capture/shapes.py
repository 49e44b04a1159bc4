"""Captures a job's loss by shapes: for a model of any size, on any machine, for any device.

The model is built without the values of its parameters, as ranks do it (`parameters/values/building.py`); buffers and what else
constructors compute are real: `torch.linspace(0, 0.1, 12)[3].item()`. Where it needs them it is built with them. Its parameters
and buffers are then replaced by fake tensors, which have no memory, to export the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.data.to_device import lifted
from meshloom.parameters.values.building import READS, NotDescribableError, described
from meshloom.program.capture.causal_masks import with_causal_attention
from meshloom.program.capture.guards import Guards
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.ir.replaced import replaced
from meshloom.program.ir.sparse_constants import empty_like
from meshloom.program.opaque.call import UnrecordedLeafError
from meshloom.program.trace.block_calls import Shortcuts
from meshloom.program.trace.build import build
from meshloom.program.trace.on_cpu import fake_mode
from meshloom.program.trace.precision import build_model
from meshloom.program.trace.repeated_export import (
    capturing,
    check_tensors,
    device_of,
    export_once,
    with_shortcuts,
)

Built = tuple[nn.Module, FakeTensorMode]
NEEDS_VALUES = (
    "Leaves run once, on values, and the model does not fit into the memory of this host with them."
)


def capture_shapes(
    job: Job,
    batch: Any,
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kept: Callable[[nn.Module, Leaves, Callable[[], Program]], Program] | None = None,
    built: Callable[[Callable[[], Built]], Built] | None = None,
) -> Program:
    """The program of `job.loss` for the shapes of `batch`, like `capture`, but without values: for analysis
    only.

    What only the comparison with eager shows is not refused.
    dtype: convert the model and the batch to it first.
    device: of the program; it need not exist. Code takes its CPU branches, and autocast casts as on the CPU.
    kept: returns the program for the fake model and batch, from a cache or by calling its last argument.
    built: returns the model, unused so far, likewise.
    Raises `CaptureError` if there is no program.
    """
    leaves = leaves_of(batch)
    check_tensors(leaves)
    where = torch.device(device)

    def build_here() -> Built:
        return model_by_shapes(job, dtype, training=training)

    with capturing(dtype), on_cpu(where):
        model, mode = built(build_here) if built else build_here()
        shapes = Leaves(
            {name: fake_of(leaf, mode, dtype) for name, leaf in leaves.tensors.items()}, leaves.rebuild, {}
        )

        def read() -> Program:
            guards = Guards(job.loss, model)
            guards.check_code()

            def built(shortcuts: Shortcuts) -> Program:
                with guards.following() as loss:
                    exported = export_once(model, loss, shapes, shortcuts)
                return build(exported, model, shapes.tensors, device_of(model, shapes), dtype)

            try:
                program = with_causal_attention(with_shortcuts(built))
            except UnrecordedLeafError as error:
                raise CaptureError(NEEDS_VALUES) from error
            constants = {name: empty_like(each, "meta") for name, each in program.constants.items()}
            return replace(moved_to(program, where), constants=constants, by_shapes=True)

        return kept(model, shapes, read) if kept else read()


def model_by_shapes(job: Job, dtype: torch.dtype | None, *, training: bool) -> Built:
    """The job's model with fake parameters and buffers, on the CPU, and the mode for its batches.

    dtype: as in `capture_shapes`.
    """
    mode = fake_mode(static_shapes=True, allow_non_fake_inputs=True)
    model = _without_values(partial(build_model, job, None, training=training))
    _convert(model, mode, dtype)
    return model, mode


def _without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """With parameters on the meta device; with everything there, where one of them does not fit into the memory; or with the
    values that constructors read."""
    try:
        return described(build)
    except NotDescribableError:
        pass
    try:
        with torch.device("meta"):
            return build()
    except READS:
        return build()


@contextmanager
def on_cpu(device: torch.device) -> Iterator[None]:
    """A context in which tensors for `device` are created on the CPU."""
    with _OnCPU(), _autocast_of(device) if device.type != "cpu" else nullcontext():
        yield


def moved_to(program: Program, device: torch.device) -> Program:
    """A program captured on the CPU, as one of `device`."""
    return replace(program, nodes=tuple(_node_on(node, device) for node in program.nodes), device=device)


def _convert(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Replace every parameter and buffer by a fake one of this dtype; tied ones stay tied."""
    fakes: dict[Tensor, Tensor] = {}
    modules: list[Any] = list(model.modules())
    for module in modules:
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                if tensor not in fakes:
                    fakes[tensor] = fake_of(tensor, mode, dtype)
                # not into the dict directly: recurrent layers keep a list of their weights
                setattr(module, name, fakes[tensor])


def fake_of(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """A fake tensor like this one, on the CPU. dtype: of a floating-point one; default: its own."""
    wanted = lifted(tensor.dtype, dtype)
    if wanted == tensor.dtype and tensor.device.type == "cpu":
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class _OnCPU(TorchFunctionMode):
    """Replaces every device by the CPU: autograd aborts at a device for which torch was not built."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to("cpu")
        if func is Tensor.to:
            args = [_cpu(each) if isinstance(each, str) else each for each in args]
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return func(*(_cpu(each) if isinstance(each, torch.device) else each for each in args), **kwargs)


def _cpu(device: Any) -> Any:
    """The CPU for any device but `meta`; None stays None."""
    kind = "cuda" if isinstance(device, int) else torch.device(device).type if device is not None else "meta"
    return device if kind in ("cpu", "meta") else torch.device("cpu")


def _autocast_of(device: torch.device) -> AbstractContextManager[None]:
    """Opens autocast regions for `device` on the CPU, with their dtype."""
    autocast: Any = torch.amp.autocast_mode.autocast
    begin = autocast.__init__

    def on_cpu(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == device.type:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device_type)
        begin(self, device_type, dtype, *args, **kwargs)

    return replaced(autocast, "__init__", on_cpu)


def _node_on(node: Node, device: torch.device) -> Node:
    """The node with `device` for the CPU, in its arguments and autocast regions."""
    regions = tuple(
        replace(each, device=device.type) if each.device == "cpu" else each for each in node.context.autocast
    )
    kwargs = {key: _with_device(each, device) for key, each in node.kwargs.items()}
    context = replace(node.context, autocast=regions)
    return replace(node, args=_with_device(node.args, device), kwargs=kwargs, context=context)


def _with_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_device(each, device) for each in value)
    return device if isinstance(value, torch.device) and value.type == "cpu" else value
