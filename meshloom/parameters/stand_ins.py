"""Values for a comparison in which a model's parameters need not all be there at once: parameters of equal shape and
convention lie at different places of one memory.

    blocks.0.up.weight   [ 0 1 2 3 4 5 6 7 ]
    blocks.1.up.weight     [ 1 2 3 4 5 6 7 0 ]      made like the first one, and other numbers than it has
    blocks.2.up.weight       [ 2 3 4 5 6 7 0 1 ]

So a program that mistakes a parameter for one that is like it computes something else. Trained and frozen ones are
apart: a loss may write one with the values of the other. Those that count as buffers have memory of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from meshloom.core.random import derive
from meshloom.parameters.values.building import READS
from meshloom.parameters.values.conventions import values_by_convention
from meshloom.program.ir.written_parameters import written_parameters

APART = 16  # elements between the beginnings of two parameters


@contextmanager
def standing_in(model: nn.Module, like: nn.Module, device: torch.device) -> Iterator[None]:
    """A context in which the parameters of a model have values on `device`; at its end they are as before. Nothing may
    write to them. like: the same model with parameters on the meta device."""
    before = [(each, each.data) for each in model.parameters()]
    try:
        alike = {names[0]: [model.get_parameter(name) for name in names] for names in _alike(model)}
        for name, values in _made(like, alike, derive("stand-in")):
            first, *others = alike[name]
            if others:
                _overlap(values.reshape(-1).to(first.dtype), [first, *others], device)
            else:
                first.data = values.to(device, first.dtype)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def stand_in_bytes(model: nn.Module) -> int:
    """Bytes of the values that `standing_in` gives to the parameters."""
    alike = [[model.get_parameter(name) for name in names] for names in _alike(model)]
    return sum(each[0].nbytes + APART * (len(each) - 1) * each[0].itemsize for each in alike)


def drawn(tensor: Tensor, seed: int) -> Tensor:
    """Values in its shape on the CPU for what has no convention: vectors, of which most are scales, around one."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros_like(tensor, device="cpu")
    values = torch.empty_like(tensor, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    if tensor.ndim > 1:
        return values.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    return values.normal_(generator=generator).mul_(0.1).add_(1.0)


def _alike(model: nn.Module) -> list[list[str]]:
    """The names of the parameters that share memory, each once."""
    alike: dict[Hashable, list[str]] = {}
    apart = written_parameters(model)
    for name, each in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        kind = type(model.get_submodule(path)), attribute
        key = name if name in apart else (*kind, each.shape, each.dtype, each.requires_grad)
        alike.setdefault(key, []).append(name)
    return list(alike.values())


def _made(like: nn.Module, names: Iterable[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Values for the parameters of these names, of which `like` has the shapes: by convention where there is one."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    for path, of_module in by_module.items():
        own: dict[str, Tensor] = {}
        with suppress(*READS):  # of a convention that needs other modules
            own = values_by_convention(like, path, derive(seed, path))
        for name in of_module:
            parameter, values = like.get_parameter(name).detach(), own.get(name.rpartition(".")[2])
            if not parameter.is_meta:
                values = parameter
            elif values is None or bool(values.isnan().any()):
                values = drawn(parameter, derive(seed, name))
            yield name, values


def _overlap(values: Tensor, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Each parameter gets all of `values`, flat, from another element on."""
    size, more = values.numel(), APART * (len(parameters) - 1)
    memory = torch.empty(size + more, dtype=values.dtype, device=device)
    memory[:size] = values
    memory[size:] = values[:more] if more <= size else values.repeat(-(-more // max(size, 1)))[:more]
    for number, parameter in enumerate(parameters):
        parameter.data = memory[number * APART :][:size].view(parameter.shape)
