"""Moving averages that a script keeps of its model: found among the values of its names, by what they become.

a[k] = d a[k-1] + (1 - d) p[k]      p: the parameters after step k

What fits this in every step is such an average, whatever class keeps it, and d is its decay.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.adopt.watching.passes import SeenFrame, on_host

NO_HOLDERS = (type, types.ModuleType, types.FunctionType, torch.optim.Optimizer)
_FITS, _ROUNDING = 1e-4, 2.0**-22  # of what a step changes, and of the values themselves


@dataclass(frozen=True, kw_only=True)
class SeenAverage:
    """name: of the object that holds it. holder: that object. decay: as it was fitted. from_initial: whether it begins with the
    initial parameters, rather than with those after the first step. values: after `steps` steps, by name of parameter."""

    name: str
    holder: Any
    decay: float
    from_initial: bool
    values: dict[str, Tensor]
    steps: int


class Averages:
    """Copies of a model among the values of names, recorded after each step."""

    def __init__(self) -> None:
        self._parameters: list[dict[str, Tensor]] = []  # initial ones, and after each step
        self._copies: dict[str, tuple[Any, list[dict[str, Tensor]]]] = {}

    def record(self, model: nn.Module, frames: Sequence[SeenFrame]) -> None:
        """Before a step's update. frames: at the first `backward()`."""
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._parameters.append({name: on_host(each) for name, each in trained.items()})
        for frame in frames:
            for name, value in [*frame.globals.items(), *frame.attributes.items(), *frame.values.items()]:
                is_owner = any(value is each.owner for each in frames if each.owner is not None)
                copy = None if is_owner else copy_of(value, model, trained)
                if copy is not None:
                    kept = self._copies.setdefault(name, (value, []))[1]
                    if len(kept) < len(self._parameters):
                        kept.append({key: on_host(each) for key, each in copy.items()})

    def found(self) -> SeenAverage | None:
        """The first that is a moving average with one decay in all steps."""
        for name, (holder, copies) in self._copies.items():
            if len(copies) == len(self._parameters) >= 4:
                decays = [
                    each
                    for before, after, parameters in zip(copies[1:], copies[2:], self._parameters[2:], strict=False)
                    if (each := _decay(before, after, parameters)) is not None
                ]  # fmt: skip
                steady = len(decays) == len(copies) - 2 and max(decays) - min(decays) <= 1e-3
                if not steady or not 0 < min(decays) <= max(decays) < 1:
                    continue
                decay = sum(decays) / len(decays)
                whole = _equal(copies[1], self._parameters[1])
                if whole or _equal(copies[0], self._parameters[0]):
                    return SeenAverage(
                        name=name, holder=holder, decay=decay, from_initial=not whole, values=copies[-1], steps=len(copies) - 1
                    )  # fmt: skip
        return None


def copy_of(value: Any, model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The copy of the model's trained parameters that an object is or holds: a module, or tensors by name or in order."""
    for one in _candidates(value):
        if isinstance(one, nn.Module) and one is not model:
            own = dict(one.named_parameters())
            names = {name: own.get(name, own.get(f"module.{name}")) for name in trained}
        elif isinstance(one, dict):
            names = {name: one.get(name) for name in trained}
        elif isinstance(one, list | tuple) and len(one) == len(trained):
            names = dict(zip(trained, one, strict=True))
        else:
            continue
        found = {name: each for name, each in names.items() if isinstance(each, Tensor)}
        if len(found) == len(trained) and all(
            each.shape == trained[name].shape and each is not trained[name] for name, each in found.items()
        ):
            return found
    return None


def _candidates(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module | dict | list | tuple):
        yield value
    elif hasattr(value, "__dict__") and not isinstance(value, NO_HOLDERS):
        yield from (
            each for each in vars(value).values() if isinstance(each, nn.Module | dict | list | tuple)
        )


def _decay(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> float | None:
    """d of after = d before + (1 - d) parameters; None where there is none."""
    old = torch.cat([(before[name].double() - each.double()).flatten() for name, each in parameters.items()])
    new = torch.cat([(after[name].double() - each.double()).flatten() for name, each in parameters.items()])
    size = float(old @ old)
    if not size:
        return None
    decay = float(new @ old) / size
    length = float(torch.cat([each.double().flatten() for each in after.values()]).norm())
    left = float((new - decay * old).norm())
    return decay if left <= _FITS * size**0.5 + _ROUNDING * length else None


def _equal(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(each, others[name]) for name, each in values.items())
