"""What a forward leaves on its modules besides results, such as a penalty for the loss: a program leaves nothing there, so that reading it is an
error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import TrainingError

_OPERATIONS = (
    "add radd sub rsub mul rmul truediv rtruediv neg pow matmul rmatmul eq ne lt le gt ge bool float int len iter getitem call format"
)  # fmt: skip


class LeftBehind:
    """In the place of an attribute that forwards set. where: its name and what set it."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and files ask for
            raise AttributeError(name)
        raise self.error()

    def error(self) -> TrainingError:
        """For who reads it."""
        return TrainingError(
            f"{self._where} is set by the forward, and one that tp or pp divides leaves nothing on its modules. Return it with the results, or use a plan with dp and "
            "zero alone."
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, LeftBehind)).error()


def _refusing(self: LeftBehind, *_: Any) -> Any:
    raise self.error()


for _name in _OPERATIONS.split():
    setattr(LeftBehind, f"__{_name}__", _refusing)
LeftBehind.__hash__ = object.__hash__


def left_behind(copy: nn.Module, forward: Callable[..., Any], batch: Any) -> list[tuple[str, str]]:
    """Names of modules and of their attributes in which a forward leaves what has a gradient. It runs on this copy."""
    forward(copy, batch)
    return [
        (path, name)
        for path, each in copy.named_modules()
        for name, value in vars(each).items()
        if not name.startswith("_")
        and any(isinstance(one, Tensor) and one.grad_fn for one in tree_leaves(value))
    ]


def replace_left_behind(module: nn.Module, names: list[tuple[str, str]]) -> None:
    """Puts a `LeftBehind` in each of these places."""
    for path, name in names:
        owner = module.get_submodule(path)
        vars(owner)[name] = LeftBehind(f"{type(owner).__name__}.{name}")
