"""The values of a model that is built as a whole, on one rank of a host at a time, and let go of once this rank has taken its
share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.machine.process_memory import Shortage
from meshloom.parameters.digest import digest
from meshloom.parameters.model import all_named, state_of
from meshloom.parameters.values.initial_values import HeldTensor, InitialValues

_PLAIN = (bool, int, float, complex, str, bytes)
_WAY_OUT = (
    "Let the model function draw with torch's, numpy's and Python's own generators, which are seeded, or use Job(weights=...); under dp alone rank 0's values "
    "are copied."
)


class WholeModel(InitialValues):
    """Values as the job's model function computes and draws them.

    build: the model, on the CPU. like: the same, as it was described, before ranks divide it. lacking: names of what has no
    values there. given: of what gets its values elsewhere. draws: whether what was described may have other values, as it
    was drawn after parameters. fixed: whether attributes of modules are constants of what runs.
    digests: of what this rank has built, by name.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        like: nn.Module,
        lacking: Collection[str],
        given: Collection[str],
        *,
        draws: bool,
        fixed: bool,
    ) -> None:
        self._build, self._draws, self._fixed = build, draws, fixed
        self._lacking = set(state_of(like)) if draws else set(lacking)
        self._wanted = self._lacking.difference(given)
        self._shape = _shape_of(like)
        self._modules = dict(like.named_modules(remove_duplicate=False))
        self._attributes = {path: _attributes_of(each) for path, each in self._modules.items()}
        self.digests: dict[str, int] = {}

    def fill(self, held: Sequence[HeldTensor]) -> None:
        wanted = [each for each in held if each.name in self._lacking]
        if not wanted and not self._draws:
            return
        model = self._build()
        self._check(model)
        state = {name: each.detach() for name, each in all_named(model)}
        with torch.no_grad():
            for each in wanted:
                each.take(state[each.name])
            self.digests = {name: int(digest(state[name])) for name in self._wanted}
        self._take_attributes(model)
        del model, state
        gc.collect()
        Shortage.trim()

    @property
    def is_built(self) -> bool:
        return bool(self._wanted) or self._draws

    def _check(self, model: nn.Module) -> None:
        """Raises `JobError` if it is another model than was described."""
        mine, other = self._shape, _shape_of(model)
        if mine != other:
            names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
            name = names[0]
            raise JobError(
                f"The model function builds another model with the values of parameters than without: {name} is {other.get(name, 'missing')}, and was "
                f"{mine.get(name, 'missing')} when the model was divided. {_WAY_OUT}"
            )

    def _take_attributes(self, model: nn.Module) -> None:
        """Plain values and tensors that modules have as attributes, where they depend on draws or parameters."""
        owned = {
            each.untyped_storage().data_ptr() for each in model.parameters() if each.layout == torch.strided
        }
        for path, module in model.named_modules(remove_duplicate=False):
            mine = self._attributes[path]
            for name, value in _attributes_of(module).items():
                if name not in mine or not _differs(mine[name], value):
                    continue
                is_computed = isinstance(mine[name], Tensor) and mine[name].is_meta
                if is_computed and (self._fixed or value.untyped_storage().data_ptr() in owned):
                    continue  # anew before each forward, as by a hook of weight_norm
                if self._fixed:
                    raise JobError(
                        f"{name} of {path or 'the model'} depends on the values of parameters, or is drawn after them, and is a constant of the program, which was "
                        "captured before they had any. Make it a buffer."
                    )
                vars(self._modules[path])[name] = value.detach() if isinstance(value, Tensor) else value


def check_alike(found: Sequence[dict[str, int]]) -> None:
    """Raises `JobError` if ranks have built different models. found: digests by rank; none of one that has built none."""
    there = [(rank, each) for rank, each in enumerate(found) if each]
    for rank, each in there[1:]:
        first, known = there[0]
        for name, value in known.items():
            if each.get(name) != value:
                raise JobError(
                    f"{name} has other values on rank {rank} than on rank {first}: the model function builds another model each time, and ranks that hold parts "
                    f"of one build it one after another. {_WAY_OUT}"
                )


def _shape_of(model: nn.Module) -> dict[str, str]:
    """Classes of modules, and shapes of tensors, with the first name of tied ones."""
    found = {
        path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False) if path
    }
    first: dict[int, str] = {}
    for name, each in all_named(model):
        found[name] = f"{list(each.shape)} {first.setdefault(id(each), name)}"
    return found


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Plain values and dense tensors, but for its mode."""
    return {
        name: each
        for name, each in vars(module).items()
        if name != "training"
        and (isinstance(each, _PLAIN) or (isinstance(each, Tensor) and each.layout == torch.strided))
    }


def _differs(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        if mine.is_meta or mine.shape != other.shape or mine.dtype != other.dtype:
            return True
        return int(digest(mine)) != int(digest(other))
    return type(mine) is not type(other) or bool(mine != other and (mine == mine or other == other))
