"""Runs a chunk's forward again on other values of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.errors import PeerLostError
from meshloom.core.random import preserved_draws
from meshloom.program.ir.written_parameters import written_parameters
from meshloom.replica.buffers.recurrence import same
from meshloom.replica.buffers.tracked_buffer import TrackedBuffer, fits


class Rerun:
    """Runs a chunk again on other values of its buffers; afterwards all of the model's are as they were.

    ends: what came of it; where its forward alone gives something else, its backward runs too. So it does of a loss that
        takes gradients itself, which fails without them.
    """

    def __init__(
        self, buffers: Iterable[TrackedBuffer], rerun: Callable[[], Any], model: nn.Module,
        ends: Mapping[str, Tensor] | None,
    ) -> None:  # fmt: skip
        self._buffers, self._rerun, self._model = list(buffers), rerun, model
        self._backward = False
        if ends is not None:
            results, _ = self({buffer.name: buffer.start for buffer in self._buffers})
            self._backward = any(not same(results[name], end) for name, end in ends.items())

    def __call__(self, values: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        if self._backward:
            return self._run(values)
        try:
            return self._run(values)
        except PeerLostError:
            raise
        except Exception:
            self._backward = True
            try:
                return self._run(values)
            except BaseException:
                self._backward = False
                raise

    def _run(self, values: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        # with others than the chunk's own values it may write other buffers, too
        with _restored(self._model):
            for buffer in self._buffers:
                buffer.put(values[buffer.name].clone())
            with torch.set_grad_enabled(self._backward), preserved_draws():
                loss = self._rerun()
                # checkpointed parts write once more
                if self._backward and isinstance(loss, Tensor) and loss.requires_grad:
                    loss_of = [each for each in self._model.parameters() if each.requires_grad]
                    torch.autograd.grad(loss, loss_of, allow_unused=True)
            results: dict[str, Tensor] = {}
            for buffer in self._buffers:
                result = buffer.now()
                if result is None or not fits(result, buffer):
                    raise ValueError("a buffer took another shape")
                results[buffer.name] = result.detach().clone()
            return results, loss.detach() if isinstance(loss, Tensor) else loss


@contextmanager
def written_restored(model: nn.Module) -> Iterator[None]:
    """Put back the values of the parameters that count as buffers."""
    written = [
        (each, each.detach().clone()) for each in written_parameters(model).values() if not each.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in written:
                if not same(parameter, value):
                    parameter.copy_(value)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, the object and its values."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        if buffer is not None
    ]
    try:
        with written_restored(model):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                # a backward to come may want what did not change
                if buffer.shape != value.shape:  # resized in place
                    buffer = value
                elif not buffer.is_meta and not same(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]
