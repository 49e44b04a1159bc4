"""What forwards and metrics write to buffers and attributes, put back: a second implementation of the rule in docs/contract.md, which waits for no
sign of a write and compares everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TORCHS = {*vars(nn.Module())} - {"training"}


class StateBefore:
    """Buffers, untrained parameters, and plain values in attributes of `model`, as they are now. tensors: copies of the first two, by name."""

    def __init__(self, model: nn.Module) -> None:
        # all that a forward may change; parameters without gradients are a teacher's
        named: list[tuple[str, Tensor]] = [
            each for each in model.named_parameters() if not each[1].requires_grad
        ]
        named += model.named_buffers()
        self.tensors = {name: each.detach().clone() for name, each in named}
        known = {id(each): _kept_tensor(each, self.tensors[name]) for name, each in named}
        self._tensors = [*known.values()]
        self._modules = [
            (
                module,
                {name: _kept(each, known) for name, each in _buffers(module).items()},
                {
                    name: _kept(each, known)
                    for name, each in vars(module).items()
                    if name not in _TORCHS and _is_plain(each)
                },
            )
            for module in model.modules()
        ]

    def put_back(self) -> None:
        """Other objects in attributes stay."""
        with torch.no_grad():
            for put in self._tensors:
                put()
            for module, buffers, attributes in self._modules:
                _buffers(module).clear()
                _buffers(module).update({name: put() for name, put in buffers.items()})
                others = {name for name, each in vars(module).items() if not _is_plain(each)}
                for name in vars(module).keys() - others - attributes.keys() - _TORCHS:
                    del vars(module)[name]
                vars(module).update({name: put() for name, put in attributes.items() if name not in others})


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Those that a forward may replace, which are no scripted module's."""
    return {} if isinstance(module, torch.jit.ScriptModule) else vars(module)["_buffers"]


def _kept(value: Any, known: Mapping[int, Callable[[], Tensor]]) -> Callable[[], Any]:
    """What gives the same object, holding what it holds now. known: of tensors, by identity."""
    if isinstance(value, Tensor):
        return known.get(id(value)) or _kept_tensor(value, value.detach().clone())
    if not isinstance(value, dict | list | set | tuple):
        return lambda: value
    parts = [_kept(each, known) for each in (value.values() if isinstance(value, dict) else value)]
    names = list(value) if isinstance(value, dict) else []

    def put() -> Any:
        now = [part() for part in parts]
        if isinstance(value, tuple):
            return value
        value.clear()
        if isinstance(value, list):
            value.extend(now)
        else:
            value.update(zip(names, now, strict=True) if isinstance(value, dict) else now)
        return value

    return put


def _kept_tensor(tensor: Tensor, before: Tensor) -> Callable[[], Tensor]:
    def put() -> Tensor:
        if tensor.shape != before.shape:
            tensor.data = before.clone()
        elif tensor.layout == torch.strided and not tensor.is_nested and not same(tensor, before):
            tensor.copy_(before)
        return tensor

    return put


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    return value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two values are equal; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
