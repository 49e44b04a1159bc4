"""The parameters of a model in lower precision, and the copies that a plain loop updates in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy
import torch
from torch import Tensor, nn

from meshloom.core.random import derive

LOWERED = {"bf16": torch.bfloat16, "bf16-stochastic": torch.bfloat16}  # precisions of plans -> of parameters
BY_CHANCE = ("bf16-stochastic",)  # copies are not kept, and parameters rounded by chance


class ReferenceMasters:
    """What the optimizers of `model` update, by name: copies of its floating-point trained parameters, which are then rounded to
    `dtype`, as its buffers and batches are; the parameters themselves if there is no such dtype. Layers with running
    statistics stay as they are. precision: of the plan; "": no copies. seed: of draws for rounding."""

    def __init__(self, model: nn.Module, precision: str, seed: int) -> None:
        self.dtype = dtype = LOWERED.get(precision)
        self._by_chance, self._seed = precision in BY_CHANCE, seed
        self._step, self._update = -1, 0
        self._exact: dict[str, Tensor] = {}  # before the newest rounding by chance
        self._before: dict[str, Tensor] = {}
        self._parameters = dict(model.named_parameters())
        layers = [each for each in model.modules() if getattr(each, "running_var", None) is not None]
        kept = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
        self.all: dict[str, nn.Parameter] = {
            name: _copy(each)
            if dtype and each.requires_grad and each.is_floating_point() and id(each) not in kept
            else each
            for name, each in self._parameters.items()
        }
        if dtype:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point() and id(tensor) not in kept:
                    tensor.data = tensor.data.to(dtype)
        for name, copy in self.all.items() if self._by_chance else ():
            if copy is not self._parameters[name]:
                copy.data = self._parameters[name].data.float()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the model."""
        yield from self.all.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of the model."""
        yield from self.all.values()

    def values_before(self, initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all values before an update. initial: those at the start of the step, of what forwards may change."""
        return {
            name: initial[name] if name in initial else each.detach().clone()
            for name, each in self.all.items()
        }

    def take_gradients(self) -> None:
        """Each copy gets its parameter's gradient, in its own precision."""
        for name, parameter in self._parameters.items():
            copy, gradient = self.all[name], parameter.grad
            if copy is not parameter:
                copy.grad = None if gradient is None else gradient.to(copy.dtype)

    def round(self, step: int) -> None:
        """After an update in this step: each parameter is its copy, rounded."""
        self._update = self._update + 1 if step == self._step else 0
        self._step = step
        for name, parameter in self._parameters.items():
            copy = self.all[name]
            if copy is parameter:
                continue
            copy.grad = None
            if self._by_chance:
                self._before[name], self._exact[name] = parameter.detach().float(), copy.detach().clone()
                copy.data.copy_(self._rounded(name, self._exact[name]))
            parameter.data.copy_(copy.data)

    def _rounded(self, name: str, exact: Tensor) -> Tensor:
        return rounded_by_chance(exact, self._seed, self._step, self._update, name)

    def settled(self, name: str, ours: Tensor) -> Tensor:
        """A plan's value after an update, with this one's where the draw takes the same value, but for what float32 rounds, to
        either."""
        if name not in self._exact:
            return ours
        exact = self._exact[name]
        slack = 1e-4 * (exact - self._before[name]).abs() + 2**-21 * exact.abs()
        sides = self._rounded(name, exact - slack).float(), self._rounded(name, exact + slack).float()
        value = ours.to(exact)
        fits = (value >= torch.minimum(*sides)) & (value <= torch.maximum(*sides))
        return torch.where(fits, self.all[name].detach(), value)

    def replace(self, name: str, value: Tensor) -> None:
        """Continue with this value of a copy."""
        self.all[name].detach().copy_(value)
        if self.all[name] is not self._parameters[name]:
            self._parameters[name].data.copy_(self.all[name].data)


def rounded_by_chance(values: Tensor, seed: int, step: int, update: int, name: str) -> Tensor:
    """A parameter's values, float32, as bfloat16 on their device, each rounded up or down by the draw of its element. update:
    number of the update in the step.

    The upper 16 bits of a float32 are a bfloat16, the next one towards zero; the lower 16 say how far the value is from it. It
    becomes the one after that where these and the draw add up to 2**16 or more. In numpy, whose numbers may be unsigned.
    """
    flat = values.detach().cpu().contiguous().numpy().reshape(-1)
    bits = flat.view(numpy.uint32)
    key = numpy.uint64(derive(seed, "rounding", step, update, name))
    with numpy.errstate(over="ignore"):
        state = numpy.arange(flat.size, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> numpy.uint64(shift))) * numpy.uint64(factor)
    state ^= state >> numpy.uint64(31)
    draws = (state % numpy.uint64(2**16)).astype(numpy.uint32)
    upper, lower = bits >> 16, bits % 2**16
    up = (lower + draws >= 2**16) & numpy.isfinite(flat)
    found = ((upper + up) << 16).astype(numpy.uint32).view(numpy.float32)
    nearest = torch.from_numpy(numpy.where(numpy.isfinite(flat), found, flat))
    return nearest.to(torch.bfloat16).view(values.shape).to(values.device)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)
