"""Values for a comparison in which a model's parameters need not all be there at once: parameters that are made
alike lie at different places of one memory.

    blocks.0.up.weight   [ 0 1 2 3 4 5 6 7 ]
    blocks.1.up.weight     [ 1 2 3 4 5 6 7 0 ]      drawn like the first one, and other numbers than it has
    blocks.2.up.weight       [ 2 3 4 5 6 7 0 1 ]

So a program that mistakes a parameter for one that is like it computes something else. Trained and frozen ones are
apart: a loss may write one with the values of the other. Those that it is known to write have memory of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshloom.core.random import derive
from meshloom.parameters.construction.draw_stream import SeededDraws
from meshloom.parameters.construction.recording import RecordedTensors
from meshloom.parameters.construction.replay import Replay
from meshloom.parameters.construction.tape import Place, Tape
from meshloom.program.ir.written_parameters import settled_names, written_parameters

APART = 16  # elements between the beginnings of two parameters
# Operators whose results have elements that are independent of each other and of their places, in place or not;
# without underscores.
_ELEMENTWISE = {
    "normal", "uniform", "no_grad_trunc_normal", "randn", "rand", "zero", "fill", "ones", "zeros", "full",
    "ones_like", "zeros_like", "full_like", "randn_like", "rand_like",
    "mul", "div", "add", "sub", "neg", "exp", "log", "clamp", "sqrt", "to_copy", "copy", "clone",
}  # fmt: skip


@contextmanager
def standing_in(model: nn.Module, recorded: RecordedTensors, device: torch.device) -> Iterator[None]:
    """A context in which the parameters of a recorded model have values on `device`; at its end they are as
    before. Nothing may write to them."""
    replay = Replay(recorded.tape, SeededDraws(lambda draw: derive("stand-in", draw)))
    before = [(each, each.data) for each in model.parameters()]
    try:
        for found in _alike(model, recorded):
            values = replay.values(found[0][0].storage)
            if not _overlaps(found):
                for place, parameter in found:
                    parameter.data = place.within(values).to(device)
            else:
                _overlap(found[0][0].within(values).reshape(-1), [each for _, each in found], device)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def stand_in_bytes(model: nn.Module, recorded: RecordedTensors) -> int:
    """Bytes of the values that `standing_in` gives to the parameters."""
    total = 0
    for found in _alike(model, recorded):
        parameter = found[0][1]
        more = APART * (len(found) - 1) * parameter.itemsize
        total += parameter.nbytes + more if _overlaps(found) else recorded.tape.num_bytes[found[0][0].storage]
    return total


def _alike(model: nn.Module, recorded: RecordedTensors) -> list[list[tuple[Place, nn.Parameter]]]:
    """The parameters that share memory: those that are made alike, or lie in one storage."""
    together: dict[int, set[Place]] = {}  # what lies in each storage
    for place in recorded.places.values():
        together.setdefault(place.storage, set()).add(place)
    alike: dict[Hashable, list[tuple[Place, nn.Parameter]]] = {}
    written, settled = written_parameters(model), settled_names(model)
    for name, parameter in model.named_parameters():
        if (place := recorded.places.get(name)) is not None and name not in written:
            is_alone = len(together[place.storage]) == 1
            apart = not is_alone or name in settled
            recipe = place.storage if apart else _recipe(recorded.tape, place)
            if not isinstance(recipe, int):
                recipe = recipe, parameter.requires_grad
            alike.setdefault(recipe, []).append((place, parameter))
    return list(alike.values())


def _overlaps(found: Sequence[tuple[Place, nn.Parameter]]) -> bool:
    """Whether they are of several storages, and get one memory all the same."""
    return len({place.storage for place, _ in found}) > 1


def _overlap(values: Tensor, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Each parameter gets all of `values`, flat, from another element on."""
    size, more = values.numel(), APART * (len(parameters) - 1)
    memory = torch.empty(size + more, dtype=values.dtype, device=device)
    memory[:size] = values
    memory[size:] = values[:more] if more <= size else values.repeat(-(-more // max(size, 1)))[:more]
    for number, parameter in enumerate(parameters):
        parameter.data = memory[number * APART :][:size].view(parameter.shape)


def _recipe(tape: Tape, place: Place) -> Hashable:
    """Equal for tensors that are made alike, with elements that may be exchanged; else the storage's number."""
    numbers: dict[int, int] = {}
    steps: list[str] = []

    def own(each: Any) -> Any:
        if not isinstance(each, Place):
            return each
        if each.size != place.size or not each.covers(tape.num_bytes[each.storage]):
            raise LookupError
        return numbers.setdefault(each.storage, len(numbers)), each.dtype

    try:
        own(place)
        for index in tape.needed([place.storage]):
            operator = tape.operators[index]
            schema = getattr(operator.function, "_schema", None)
            name = schema.name.partition("::")[2] if schema else operator.function.__name__
            if name.strip("_") not in _ELEMENTWISE or operator.generator is not None:
                return place.storage
            what = tree_map(own, (operator.args, dict(operator.kwargs), operator.results))
            steps.append(f"{operator.function} {what} {operator.default_dtype}")
    except LookupError:
        return place.storage
    if numbers.keys() & tape.constants.keys():
        return place.storage
    return place.size, place.dtype, tuple(steps)
