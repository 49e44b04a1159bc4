"""Digests of Python objects, equal where their classes, attributes, items, code and tensors are equal."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Self

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshloom.program.ir.sparse_constants import bits_of, dense_parts
from meshloom.program.store.code_digest import add_class, add_function
from meshloom.program.trace.attributes import TORCHS_OWN

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (bool, int, float, complex, str, bytes)
_BY_REPR = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    range,
    slice,
    numpy.generic,
    numpy.dtype,
    Path,
)
_torch: Any = torch
_ops: Any = _torch._ops
_OPERATORS = (_ops.OpOverload, _ops.OpOverloadPacket)
_BUILT_IN = (
    BuiltinFunctionType,
    BuiltinMethodType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
)


class NoDigestError(Exception):
    """Raised for an object that cannot be digested, so its equality with another is unknown. what: its
    description, as the beginning of a sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class ObjectDigest:
    """A digest to which values are added one by one."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        # id -> (number, object); holding the objects keeps their ids unique
        self._seen: dict[int, tuple[int, Any]] = {}

    def text(self) -> str:
        return self._hash.hexdigest()

    def module(self, model: nn.Module) -> Self:
        """Add the structure: classes, attributes, hooks, and parameters and buffers without their values."""
        numbers: dict[int, int] = {}
        for _, module in model.named_modules():
            self._seen.setdefault(id(module), (len(self._seen), module))
        for path, module in model.named_modules(remove_duplicate=False):
            known = id(module) in numbers
            self.put("module", path, numbers.setdefault(id(module), len(numbers)), module.training)
            if known:
                continue
            self._class(type(module))
            for name, tensor in (*vars(module)["_parameters"].items(), *vars(module)["_buffers"].items()):
                if tensor is None:
                    self.put(name, None)
                else:
                    number = numbers.setdefault(id(tensor), len(numbers))
                    self.put(name, number, isinstance(tensor, nn.Parameter), *_kind(tensor))
            self._attributes(module, path)
        return self

    def buffers(self, model: nn.Module) -> Self:
        """Add the values of all buffers."""
        for name, buffer in model.named_buffers():
            self.put(name)
            self._values(buffer)
        return self

    def add(self, value: Any, where: str) -> Self:
        """Add a value. where: its description in error messages."""
        kind: Any = type(value)
        if value is None or value is Ellipsis or value is NotImplemented or (kind in _SCALARS):
            self.put(kind.__name__, repr(value))
        elif isinstance(value, enum.Enum):
            self.put(kind.__module__, kind.__qualname__, value.name)
        elif isinstance(value, _BY_REPR):
            self.put(kind.__name__, repr(value))
        elif id(value) in self._seen:
            self.put("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            self.put(kind.__module__, kind.__qualname__)
            self._add_new(value, where)
        return self

    def _add_new(self, value: Any, where: str) -> None:
        if isinstance(value, Tensor):
            self.put(*_kind(value))
            self._values(value)
        elif isinstance(value, numpy.ndarray):
            if value.dtype.hasobject:
                raise NoDigestError(f"{where}, an array of objects,")
            elements = hashlib.blake2b(numpy.ascontiguousarray(value).tobytes()).hexdigest()
            self.put(str(value.dtype), value.shape, elements)
        elif isinstance(value, FunctionType):
            add_function(self, value, where)
        elif isinstance(value, type | GenericAlias):
            self._class(value) if isinstance(value, type) else self.put(repr(value))
        elif isinstance(value, MethodType):
            self.add(value.__func__, where)
            self.add(value.__self__, f"what {where} is a method of")
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords), where)
        elif isinstance(value, _OPERATORS):
            self.put(str(value))
        elif isinstance(value, _BUILT_IN):
            self.put(value.__qualname__)
            owner = getattr(value, "__self__", None)
            of = f"what {where} is a method of"
            self.put(owner.__name__) if isinstance(owner, ModuleType) else self.add(owner, of)
        elif isinstance(value, ModuleType):
            self.put(value.__name__)
        elif isinstance(value, MappingProxyType):  # such as the metadata of dataclass fields
            self.add(dict(value), where)
        elif isinstance(value, logging.Logger):
            self.put(value.name)
        elif hasattr(value, "__wrapped__") and not hasattr(value, "__dict__"):  # functools.lru_cache
            self.add(value.__wrapped__, where)
        elif isinstance(value, weakref.ref):
            self.add(value(), where)
        elif isinstance(value, nn.Module):
            self.module(value)
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                self.put(name)
                self._values(tensor)
        else:
            self._object(value, where)

    def _object(self, value: Any, where: str) -> None:
        """Add a container, or an instance of a Python class whose only state is items and attributes."""
        kinds = dict, list, tuple, set, frozenset, deque
        container = next((each for each in kinds if isinstance(value, each)), None)
        if isinstance(value, Mapping) and container is dict:
            self.put(len(value))
            for key, each in value.items():
                self.add(key, where)
                self.add(each, f"{where}[{key!r}]")
        elif container in (set, frozenset):
            self.put(*sorted(ObjectDigest().add(each, where).text() for each in value))
        elif container is not None:
            self.put(len(value))
            for number, each in enumerate(value):
                self.add(each, f"{where}[{number}]")
        elif not _is_pure(value):
            raise NoDigestError(f"{where}, a {type(value).__qualname__},")
        if type(value).__module__ not in ("builtins", "collections"):
            self._class(type(value))
        for name, each in _attributes_of(value):
            # cached hashes of strings differ between processes
            if not (isinstance(each, int) and name.startswith("_") and name.endswith("_hash")):
                self.put(name)
                self.add(each, f"{where}.{name}")

    def _attributes(self, module: nn.Module, path: str) -> None:
        for name, value in vars(module).items():
            if name not in TORCHS_OWN and name != "training":
                self.put(name)
                self.add(value, f"{path}.{name}" if path else name)
        for name in _HOOKS:
            for hook in vars(module).get(name, {}).values():
                self.put(name)
                self.add(hook, f"a hook of {path or 'the model'}")

    def _class(self, kind: type) -> None:
        for each in kind.__mro__[:-1]:
            if -id(each) not in self._seen:
                self._seen[-id(each)] = len(self._seen), each
                add_class(self, each)

    def _values(self, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        for part in dense_parts(tensor):
            # an attribute that lies in the memory of a parameter, which has none yet, and cannot be resized once it was an array
            if part.untyped_storage().nbytes():
                self._hash.update(bits_of(part).numpy().data)

    def put(self, *facts: Any) -> None:
        """Add the text of these facts."""
        self._hash.update(f"{facts!r}\n".encode())


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    plain = type(tensor) is Tensor or isinstance(tensor, nn.Parameter | FakeTensor | nn.Buffer)
    if not plain or tensor.layout not in (torch.strided, torch.sparse_coo):
        raise NoDigestError(f"a tensor, a {type(tensor).__qualname__} of layout {tensor.layout},")
    strides = tensor.stride() if tensor.layout is torch.strided else None
    types = str(tensor.dtype), str(tensor.layout), tensor.device.type
    return tuple(tensor.shape), strides, *types, tensor.requires_grad


def _is_pure(value: Any) -> bool:
    """Whether an object's attributes are all its state: its class adds no memory to Python's objects."""
    slots = sum(
        len(names) if not isinstance(names, str) else 1
        for each in type(value).__mro__
        for names in [vars(each).get("__slots__", ())]
    )
    return type(value).__basicsize__ <= object.__basicsize__ + 8 * (2 + slots) and (
        hasattr(value, "__dict__") or slots > 0 or type(value) is object
    )


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    for name, each in getattr(value, "__dict__", {}).items():
        yield name, each
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
