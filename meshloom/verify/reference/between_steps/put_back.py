"""What metrics write to buffers and attributes, put back: a second implementation of the rule in docs/contract.md, which waits for no sign of a
write and compares everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.verify.reference.reference_buffers import same

_TORCHS = {*vars(nn.Module())} - {"training"}


class BeforeMetrics:
    """Buffers, untrained parameters, and plain values in attributes of `model`, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [_kept(each) for each in model.parameters() if not each.requires_grad]
        self._modules = [
            (module, {name: _kept(each) for name, each in vars(module)["_buffers"].items()},
             {name: _kept(each) for name, each in vars(module).items() if name not in _TORCHS and _is_plain(each)})
            for module in model.modules()
        ]  # fmt: skip

    def put_back(self) -> None:
        """Other objects in attributes stay."""
        with torch.no_grad():
            for put in self._parameters:
                put()
            for module, buffers, attributes in self._modules:
                vars(module)["_buffers"].clear()
                vars(module)["_buffers"].update({name: put() for name, put in buffers.items()})
                others = {name for name, each in vars(module).items() if not _is_plain(each)}
                for name in vars(module).keys() - others - attributes.keys() - _TORCHS:
                    del vars(module)[name]
                vars(module).update({name: put() for name, put in attributes.items() if name not in others})


def _kept(value: Any) -> Callable[[], Any]:
    """What gives the same object, holding what it holds now."""
    if isinstance(value, Tensor):
        return _kept_tensor(value)
    if not isinstance(value, dict | list | set | tuple):
        return lambda: value
    parts = [_kept(each) for each in (value.values() if isinstance(value, dict) else value)]
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


def _kept_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    before = tensor.detach().clone()

    def put() -> Tensor:
        if tensor.shape != before.shape:
            tensor.data = before.clone()
        elif tensor.layout == torch.strided and not same(tensor, before):
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
