"""Fake tensors with the results of the CPU's operators, where torch's fakes differ from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from meshloom.core.units import round_up


def fake_mode(*, static_shapes: bool | None = None, allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """A mode whose tensors have no values; sizes that depend on values are symbols. Arguments as in torch."""
    # imported here: takes half a second, which most processes save
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(
        shape_env=ShapeEnv(), static_shapes=static_shapes, allow_non_fake_inputs=allow_non_fake_inputs
    )


class AsOnCPU(TorchDispatchMode):
    """Corrects a CPU's fake results: workspace of a recurrent layer, strides of batch norm and views, CTC."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _INSTEAD:
            return _INSTEAD[func](*args)
        value = func(*args, **(kwargs or {}))
        correct = _CORRECTIONS.get(func)
        return correct(args, value) if correct else value


def _with_workspace(args: Sequence[Any], value: Any) -> Any:
    """Adds a recurrent layer's workspace, which is empty in the fake."""
    if not args[15]:
        return *value[:3], value[3].new_empty(0)
    length, batch, features = args[0].shape
    num_bytes = workspace_bytes(length, batch, features, hidden=args[10], itemsize=args[0].element_size())
    return *value[:3], value[3].new_empty(num_bytes)


def _contiguous(args: Sequence[Any], value: Any) -> Any:
    """Batch norm of a transposed tensor returns a contiguous one; the fake has its input's strides, so that
    later copies would be missing."""
    x, formats = args[0], _FORMATS.get(args[0].ndim, (torch.contiguous_format,))
    if x.device.type != "cpu" or any(x.is_contiguous(memory_format=each) for each in formats):
        return value
    return x.new_empty(x.shape, dtype=value[0].dtype), *value[1:]


def _viewed(args: Sequence[Any], value: Any) -> Any:
    """Strides of dims of size 1 in views differ in the fake, and kernels choose layouts by them."""
    if 1 not in value.shape:
        return value
    with _disable_current_modes():
        x = torch.empty_strided(args[0].shape, args[0].stride(), dtype=value.dtype, device="meta")
        strides = x.view(value.shape).stride()
    if value.stride() == strides:
        return value
    return args[0].as_strided(value.shape, strides, value.storage_offset())


def fake_ctc_loss(scores: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """scores [frames, batch, letters] or [frames, letters] -> CTC losses [batch] or [], and the tensor saved
    for backward, at its largest size, as it depends on the labels.
    """
    frames, batch = scores.shape[0], list(scores.shape[1:-1])
    return scores.new_empty(batch), scores.new_empty([*batch, frames, 2 * targets.shape[-1] + 1])


_FORMATS = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}
_CORRECTIONS: Mapping[Any, Any] = {
    torch.ops.aten.mkldnn_rnn_layer.default: _with_workspace,
    torch.ops.aten.native_batch_norm.default: _contiguous,
    torch.ops.aten.view.default: _viewed,
    torch.ops.aten._unsafe_view.default: _viewed,
}
_INSTEAD: Mapping[Any, Any] = dict.fromkeys(
    (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor), fake_ctc_loss
)


def workspace_bytes(length: int, batch: int, features: int, *, hidden: int, itemsize: int) -> int:
    """Bytes of the page-aligned workspace that oneDNN's LSTM saves: gates and states, one layer and
    direction.

    Source: oneDNN, src/cpu/rnn/rnn_utils (sizes and offsets); equals what torch 2.13 allocates.
    """
    width, rows, steps = max(features, hidden), 2 * (length + 1) * batch, length * batch
    parts = [
        rows * _row(width, itemsize) * itemsize,  # states, and their gradients in float32
        rows * _row(width, 4) * 4,
        rows * _row(width, 4) * 4,
        rows * hidden * itemsize,  # cells, and their gradients
        rows * hidden * 4,
        steps * _row(4 * hidden, itemsize) * itemsize,  # gates
        steps * _row(hidden, itemsize) * itemsize,
    ]
    return sum(round_up(part, 4096) for part in parts)


def _row(num_elements: int, itemsize: int) -> int:
    """Elements of a row: full cache lines, and one more to avoid conflicts of rows in the cache."""
    line = 64 // itemsize
    rounded = round_up(num_elements, line)
    return rounded + line if rounded % 256 == 0 else rounded
