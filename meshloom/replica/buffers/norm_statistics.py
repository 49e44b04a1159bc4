"""Running statistics of normalisation layers, as one device has them that runs all replicas' chunks in order.

They are a linear recurrence: running <- (1 - momentum) * running + momentum * batch. While a layer's own
forward runs, its running buffers are replaced by others that start the step at 0, so that a replica's chunks
together come out as

    running -> decay * running + added          decay = product of (1 - momentum) over its calls, added = what the others became

and the replicas' maps, applied in chunk order, give the same on all. The module itself, its momentum and its
buffers, are not touched: the replacement is an instance's `forward`, there only while a chunk runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.core.device.readback import on_device
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.schemas import arguments_of

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_HEADER = 3  # calls, decay, calls in evaluation mode


def tracks(module: nn.Module) -> bool:
    """Whether a layer has running statistics that torch's own forward updates."""
    if getattr(type(module), "forward", None) not in (
        _BatchNorm.forward,
        _InstanceNorm.forward,
    ) or "forward" in vars(module):
        return False
    return bool(module.track_running_stats) and module.running_mean is not None


def decays(nodes: Iterable[Node]) -> dict[str, float]:
    """The running statistics that a program's operators update, by their values' names -> the share that one chunk keeps of
    them: a layer may be called several times."""
    found: dict[str, float] = {}
    for node in nodes:
        if getattr(node.target, "_schema", None) is None:
            continue
        given = {
            argument.name: value for argument, value in arguments_of(node.target, node.args, node.kwargs)
        }
        if given.get("training") or given.get("use_input_stats"):
            for name in BUFFERS[:2]:
                if isinstance(value := given.get(name), Ref):
                    found[value.name] = found.get(value.name, 1.0) * (1.0 - given["momentum"])
    return found


def is_counter(model: nn.Module, name: str) -> bool:
    """Whether a buffer counts the calls of a layer with running statistics."""
    path, _, key = name.rpartition(".")
    return key == BUFFERS[2] and tracks(model.get_submodule(path))


class NormStatistics:
    """The running statistics of `modules` [name, layer] over one step's chunks of all replicas. compiled: their forwards
    are compiled with what is around them."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], *, compiled: bool = False) -> None:
        self._layers = [_Layer(name, module, compiled=compiled) for name, module in modules]
        index = [number for number, layer in enumerate(self._layers) for _ in range(2 * layer.channels)]
        device = self._layers[0].module.running_mean.device if self._layers else None
        # of each element of a flat part
        self._layer_of = torch.tensor(index, dtype=torch.int64, device=device)
        self._cumulative = torch.tensor(
            [layer.cumulative for layer in self._layers], dtype=torch.bool, device=device
        )

    @property
    def length(self) -> int:
        """Elements of a part: float64."""
        return _HEADER * len(self._layers) + len(self._layer_of)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around a chunk's forward and backward (a checkpointed layer runs again there)."""
        for layer in self._layers:
            layer.install()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.remove()

    def take(self) -> Tensor:
        """This replica's part of the step [length], and start the next."""
        for layer in self._layers:
            layer.count()
        header = [number for layer in self._layers for number in (layer.calls, layer.decay, layer.evaluated)]
        values = [value.double() for layer in self._layers for value in layer.added()]
        for layer in self._layers:
            layer.reset()
        return torch.cat([on_device(header, torch.float64, self._layer_of.device), *values])

    def apply(self, parts: Tensor) -> Tensor:
        """Update layers from all replicas' parts [replicas, length]; returns them [replicas, layers, 3], for `evaluated`."""
        split = _HEADER * len(self._layers)
        headers = parts[:, :split].reshape(len(parts), -1, _HEADER)
        running = torch.cat([value.double() for layer in self._layers for value in layer.running()])
        tracked = torch.stack([layer.tracked(running) for layer in self._layers])
        for header, added in zip(headers, parts[:, split:], strict=True):
            calls, decays, _ = header.unbind(1)
            # Of a cumulative one the mean over all calls so far; `added` is the mean over this replica's.
            total = (tracked + calls).clamp(min=1)
            means = torch.where(calls > 0, tracked / total, 1.0)
            decays = torch.where(self._cumulative, means, decays)
            scales = torch.where(self._cumulative, calls / total, 1.0)
            tracked = tracked + calls
            running = decays[self._layer_of] * running + scales[self._layer_of] * added
        at = 0
        for layer, count in zip(self._layers, tracked, strict=True):
            for value in layer.running():
                value.copy_(running[at : at + layer.channels])
                at += layer.channels
            layer.set_tracked(count)
        return headers

    def evaluated(self, headers: Tensor) -> list[str]:
        """Names of layers that were called in training and in evaluation mode. headers: what `apply` returned, on the host."""
        totals = headers.sum(0).tolist()
        named = zip(self._layers, totals, strict=True)
        return [layer.name for layer, (calls, _, evaluated) in named if calls and evaluated]


class _Layer:
    """One layer: what its calls of this step add up to.

    compiled: nothing can be done in Python around each call, so its buffers are replaced for all of a chunk, and its own
    counter has the number of calls. In evaluation mode it reads what the step found, without being counted.
    """

    def __init__(self, name: str, module: Any, *, compiled: bool = False) -> None:
        self.name = name
        self.module = module
        self.channels: int = module.running_mean.numel()
        self._counts = isinstance(module, _BatchNorm)  # InstanceNorm has a counter that it leaves at 0
        self._kept: dict[str, Tensor | None] = {}
        # one function for all chunks, so that it is compiled once
        self._compiled = _compiled_forward(module, self._kept) if compiled and self._counts else None
        self.reset()

    def reset(self) -> None:
        # New tensors, because autograd may have saved the old ones.
        self.calls, self.decay, self.evaluated = 0, 1.0, 0
        self._sums: dict[str, Tensor | None] | None = None

    @property
    def cumulative(self) -> bool:
        return self.module.momentum is None and self._counts

    def running(self) -> tuple[Tensor, Tensor]:
        return self.module.running_mean, self.module.running_var

    def tracked(self, like: Tensor) -> Tensor:
        """Calls so far, float64 []."""
        count = self.module.num_batches_tracked
        return like.new_zeros(()) if count is None else count.to(like.dtype)

    def set_tracked(self, count: Tensor) -> None:
        if self._counts and self.module.num_batches_tracked is not None:
            self.module.num_batches_tracked.copy_(count)

    def added(self) -> list[Tensor]:
        sums = self._sums or {name: torch.zeros_like(self.module.running_mean) for name in BUFFERS[:2]}
        return [sums[name] for name in BUFFERS[:2]]  # type: ignore[misc]  # only the counter can be None

    def install(self) -> None:
        if self._compiled is not None:
            self._kept |= {name: self.module._buffers[name] for name in BUFFERS}
            self.module._buffers.update(self._begun())
            self.module.forward = self._compiled
            return
        original: Callable[..., Any] = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            module = self.module
            if (
                self._counts and module.training and not module.track_running_stats
            ):  # switched off for a while
                return original(*args, **kwargs)
            if not module.training:
                self.evaluated += 1
                return original(*args, **kwargs)
            kept = {name: module._buffers[name] for name in BUFFERS}
            sums = self._begun()
            module._buffers.update(sums)
            finished = False
            try:
                result = original(*args, **kwargs)
                finished = True
                return result
            finally:
                module._buffers.update(kept)
                # A checkpointed layer is left by an exception in its second run, after it has updated its
                # statistics.
                if finished or not self._counts or int(sums["num_batches_tracked"] or 0) > self.calls:
                    self.calls += 1
                    self.decay *= 1.0 - (module.momentum or 0.0)

        self.module.forward = forward

    def remove(self) -> None:
        vars(self.module).pop("forward", None)
        self.module._buffers.update(self._kept)
        self._kept.clear()

    def count(self) -> None:
        """Once the step's chunks have run: `calls` and `decay` are those of all of them."""
        if self._compiled is not None and self._sums is not None:
            self.calls = int(self._sums["num_batches_tracked"] or 0)
            self.decay = (1.0 - (self.module.momentum or 0.0)) ** self.calls

    def _begun(self) -> dict[str, Tensor | None]:
        """What this step's calls write instead of the buffers."""
        if self._sums is None:
            buffers = self.module._buffers
            self._sums = {
                name: None if buffers[name] is None else torch.zeros_like(buffers[name]) for name in BUFFERS
            }
        return self._sums


def _compiled_forward(module: Any, kept: Mapping[str, Tensor | None]) -> Callable[[Tensor], Tensor]:
    """kept: the buffers of before the step, by name, while it runs."""
    original = module.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        if module.training:  # which writes nothing where `track_running_stats` is switched off
            return original(input)
        return nn.functional.batch_norm(
            input, kept["running_mean"], kept["running_var"], module.weight, module.bias, eps=module.eps
        )

    return forward


def norm_buffers(modules: Collection[nn.Module]) -> set[int]:
    """The identities of the layers' running buffers."""
    return {
        id(buffer)
        for module in modules
        for name in BUFFERS
        if (buffer := module._buffers.get(name)) is not None  # pyright: ignore[reportPrivateUsage]
    }
