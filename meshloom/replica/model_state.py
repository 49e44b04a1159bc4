"""Buffers, and plain values in attributes of modules, as they were at a moment: what an evaluation writes there is put back.

Plain values are numbers, texts, None and tensors, and tuples, lists, dicts and sets of them. Any other object stays where a forward has
left it, so that what is built once stays built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.program.ir.written_parameters import limited_tables, written_parameters

_ABSENT: Any = object()  # in place of the value of an attribute that a module does not have
_MOST_NAMES = 3  # in a sentence
_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
_MODE = "training"
_OF_TORCH = vars(nn.Module()).keys() - {_MODE}


class ModelState:
    """Those of `model` as they are now, and the modes of its modules; parameters that count as buffers, and tables with `max_norm`, are buffers here. What can be written
    in place is copied.

    written: names of what evaluations write, to which those that are found are added. `put_back` puts back tensors of these names, and others
    to which torch has counted a write. `x.data += 1` is not counted, and shows when `end` compares values.
    """

    def __init__(self, model: nn.Module, written: set[str]) -> None:
        self._written = written
        # of each module: the path, its buffers or attributes, and what they are now
        self._places: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []  # with a copy
        self._tensors: list[_CopiedTensor] = []
        known: set[int] = set()
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            own = {name: each for name, each in vars(module).items() if name not in _OF_TORCH}
            self._places.append((prefix, vars(module), own))
            if not isinstance(module, torch.jit.ScriptModule):  # whose buffers are never replaced
                self._places.append((prefix, vars(module)["_buffers"], dict(vars(module)["_buffers"])))
            for name, value in (*module.named_buffers(recurse=False), *own.items()):
                if type(value) not in _SCALARS and _is_plain(value):
                    self._copy(prefix + name, value, known)
        for name, parameter in {**written_parameters(model), **limited_tables(model)}.items():
            self._copy(name, parameter, known)

    def put_back(self) -> None:
        """After a metric."""
        for place in self._places:
            self._written.update(_put_back(*place))
        for name, value, copy in self._containers:
            if not _is_same(value, copy):
                self._written.add(name)
                value.clear()
                value.extend(copy) if type(value) is list else value.update(copy)
        for each in self._tensors:
            if each.has_counted_writes or each.name in self._written:
                self._written.add(each.name)
                each.put_back()

    def end(self) -> None:
        """After the last one. The host waits for a device once, if there are any tensors."""
        others = [each for each in self._tensors if each.name not in self._written]
        device = next((each.device for each in others if each.device.type != "cpu"), torch.device("cpu"))
        flags = [each.differs().to(device) for each in others]
        for each, differs in zip(others, torch.stack(flags).tolist() if flags else (), strict=True):
            if differs:
                self._written.add(each.name)
                each.put_back()

    def _copy(self, name: str, value: Any, known: set[int]) -> None:
        if type(value) in _SCALARS or id(value) in known:
            return
        known.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_meta and value.layout == torch.strided and _has_memory(value):
                self._tensors.append(_CopiedTensor(name, value))
            return
        if type(value) is not tuple:
            self._containers.append((name, value, value.copy()))
        for each in _elements(value):
            self._copy(name, each, known)


class _CopiedTensor:
    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self._tensor, self._before = name, tensor, tensor.detach().clone()
        self.device, self._version = tensor.device, _writes_to(tensor)

    @property
    def has_counted_writes(self) -> bool:
        return _writes_to(self._tensor) != self._version

    def differs(self) -> Tensor:
        """bool [], on the device."""
        same_shape = self._tensor.shape == self._before.shape
        if not same_shape or not _has_memory(self._tensor):
            return torch.tensor(not same_shape, device=self.device)
        return (flat_bytes(self._tensor) != flat_bytes(self._before)).any()

    def put_back(self) -> None:
        if self._tensor.shape == self._before.shape:
            self._tensor.detach().copy_(self._before)
        else:  # resized in place
            self._tensor.data = self._before.clone()
        self._version = _writes_to(self._tensor)


def shown_names(names: Sequence[str]) -> str:
    """The first few of them, for a sentence."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _writes_to(tensor: Tensor) -> int:
    """How often a tensor has been written to in place, as far as torch counts it."""
    return -1 if tensor.is_inference() else tensor._version


def _has_memory(tensor: Tensor) -> bool:
    """Parameters that ranks hold slices of have none between forwards (zero=3), nor has what shares it."""
    return tensor.untyped_storage().nbytes() > 0


def _put_back(prefix: str, now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """The names of what is another value now than before, but for other objects than plain values, which stay."""
    new = [name for name in now.keys() - before.keys() if name not in _OF_TORCH]
    for name in (*before, *new):
        value, was = now.get(name, _ABSENT), before.get(name, _ABSENT)
        if value is was or not (value is _ABSENT or _is_plain(value)):
            continue
        if was is _ABSENT:
            del now[name]
        else:
            now[name] = was
        if name != _MODE and (type(value) not in _SCALARS or type(value) is not type(was) or value != was):
            yield prefix + name


def _is_plain(value: Any, within: Collection[int] = ()) -> bool:
    """within: the containers that it is in."""
    if type(value) in _SCALARS:
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) not in (tuple, list, dict, set) or id(value) in within:
        return False
    return all(_is_plain(each, (*within, id(value))) for each in _elements(value))


def _elements(container: Any) -> Collection[Any]:
    """What it holds, where that is not numbers and texts alone."""
    values = container.values() if type(container) is dict else container
    return () if _SCALARS.issuperset(map(type, values)) else values


def _is_same(one: Any, other: Any) -> bool:
    """Whether two lists, dicts or sets hold the same objects, or equal numbers and texts."""
    if len(one) != len(other):
        return False
    if type(one) is set:
        return one == other
    if type(one) is dict:
        return all(map(is_, one, other)) and _is_same([*one.values()], [*other.values()])
    return all(map(is_, one, other)) or (not _elements(one) and not _elements(other) and one == other)
