"""Watches which tensors of a model a loss writes, while it runs once: by operators, as they write to their memory, and by
`.data = ...`, which gives them another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.program.ir.schemas import arguments_of, is_written

aten = torch.ops.aten


class LossWrites(TorchDispatchMode):
    """Writes to `model`'s parameters.

    found: names of written parameters -> the module in whose forward that was; None: in none. limited: trained tables whose
    rows an embedding scales, with `max_norm`. replaced: parameters in whose places others have been put.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str | None] = {}
        self.limited: set[str] = set()
        self.replaced: set[str] = set()
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._memory = {name: each.data for name, each in self._parameters.items()}  # if it gets other memory
        self._values: dict[str, Tensor] = {}  # of the written ones, in order
        self._by_storage: dict[int, list[str]] = {}
        for name, each in self._parameters.items():
            self._by_storage.setdefault(_storage(each), []).append(name)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._running: list[str] = []
        self._hooks = ExitStack()

    def __enter__(self) -> LossWrites:
        before, after = (
            torch_module.register_module_forward_pre_hook,
            torch_module.register_module_forward_hook,
        )
        self._hooks.callback(before(self._begun).remove)
        self._hooks.callback(after(self._ended).remove)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._hooks.close()
        self._note_moved(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        limited = func is aten.embedding_renorm_.default
        for operand in _written(func, args, kwargs):
            for name in self._names(operand):
                if name not in self._values:
                    self._values[name] = self._memory[name].clone()
                if limited and self._parameters[name].requires_grad:
                    self.limited.add(name)
                else:
                    self.found.setdefault(name, self._running[-1] if self._running else None)
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """The parameters have their memory and its values again."""
        for name, parameter in self._parameters.items():
            owner, _, key = name.rpartition(".")
            held = vars(self._model.get_submodule(owner))["_parameters"]
            if held.get(key) is not parameter:
                self.replaced.add(name)
                held[key] = parameter
            if parameter.data_ptr() != self._memory[name].data_ptr():
                parameter.data = self._memory[name]
        for name in reversed(self._values):  # parameters may lie in one memory
            self._memory[name].copy_(self._values[name])

    def _names(self, operand: Tensor) -> list[str]:
        """Of the parameters that are written with it. Those that stand in for others may lie in one memory."""
        names = self._by_storage.get(_storage(operand), [])
        exact = [name for name in names if self._memory[name].data_ptr() == operand.data_ptr()]
        return exact or names

    def _begun(self, module: nn.Module, inputs: Any) -> None:
        if id(module) in self._paths:
            self._note_moved(self._running[-1] if self._running else None)
            self._running.append(self._paths[id(module)])

    def _ended(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        self._note_moved(path)
        while self._running and self._running.pop() != path:  # a forward that failed was left without a hook
            continue

    def _note_moved(self, path: str | None) -> None:
        for name, parameter in self._parameters.items():
            if name not in self.found and parameter.data_ptr() != self._memory[name].data_ptr():
                self.found[name] = path


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for argument, value in arguments_of(func, args, kwargs):
        if is_written(argument):
            yield from (
                each
                for each in (value if isinstance(value, list | tuple) else [value])
                if isinstance(each, Tensor)
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
