"""What reading a loss depends on, as a digest for each part: equal digests, equal readings. What has no
digest raises, and nothing is guessed.

Code counts as its instructions with what it loads from globals and closures, objects by their class and
attributes, tensors by their values. What an installed package brings counts by its name, and all packages by
their versions.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshloom.core.cache import digest_of
from meshloom.core.job import LossFunction
from meshloom.program.capture.outside import Reads, reads_of
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.lines import is_users
from meshloom.program.ir.sparse_constants import dense_parts
from meshloom.program.trace.attributes import TORCHS_OWN

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes)
_BY_TEXT = (
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
_OF_A_CLASS = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__annotations__",
    "_abc_impl",
    "__abstractmethods__",
    "__parameters__",
    "__orig_bases__",
}


class UnknownError(Exception):
    """There is something of which nobody can tell whether it is equal. what: which, as the beginning of a
    sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def parts_of_reading(
    model: nn.Module, loss: LossFunction, leaves: Leaves, *, values: bool = True, known: str | None = None
) -> dict[str, str]:
    """The parts that reading `loss` depends on, for batches like this one, as digests by name. Raises
    `UnknownError`.

    values: of buffers; a model that has shapes alone has none. known: `versions()`, if it is known.
    """
    return {
        "versions": known or versions(),
        "source files": _sources(),
        "settings of torch": digest_of(repr(_settings())),
        "model": _of(lambda into: into.model(model)),
        "values of buffers": _of(lambda into: into.buffers(model)) if values else "",
        "loss": _of(lambda into: into.add(loss, "the loss")),
        "batch": digest_of(
            repr(
                [
                    (name, tuple(each.shape), each.stride(), each.dtype, each.device.type)
                    for name, each in leaves.tensors.items()
                ]
            )
        ),
        "names in the batch": digest_of(repr(list(leaves.values))),
    }


def parts_of_function(function: Callable[..., Any], what: str) -> dict[str, str]:
    """The parts that a function of the job's depends on, besides what it is given. what: it is, for people.
    Raises `UnknownError`."""
    return {
        "source files": _sources(),
        "settings of torch": digest_of(repr(_settings())),
        what: _of(lambda into: into.add(function, f"the {what}")),
    }


def versions() -> str:
    """Of Python, PyTorch, this package and whatever else is installed."""
    packages = sorted(
        each.name
        for place in sys.path
        if "-packages" in place and os.path.isdir(place)
        for each in os.scandir(place)
        if each.name.endswith(".dist-info")
    )
    root = Path(__file__).parents[2]
    own = [(str(path.relative_to(root)), digest_of(path.read_bytes())) for path in sorted(root.rglob("*.py"))]
    return digest_of(
        repr([sys.version, platform.machine(), torch.__version__, torch.version.git_version, packages, own])
    )


def _sources() -> str:
    """Of the modules that are the user's own."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    found: list[tuple[str, str]] = []
    for name, file in sorted(files.items()):
        # packages have modules of which no file is the source
        root = files.get(name.partition(".")[0]) or file
        if isinstance(file, str) and isinstance(root, str) and is_users(root) and is_users(file):
            try:
                found.append((name, digest_of(Path(file).read_bytes())))
            except OSError as error:
                raise UnknownError(f"the source of {name}, {file},") from error
    return digest_of(repr(found))


def _settings() -> list[Any]:
    """Switches of torch that change what is read."""
    backends: Any = torch.backends
    return [
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        [
            getattr(backends.cuda, name)()
            for name in (
                "flash_sdp_enabled",
                "mem_efficient_sdp_enabled",
                "math_sdp_enabled",
                "cudnn_sdp_enabled",
            )
        ],
        [backends.mkldnn.enabled, backends.cudnn.enabled, backends.mha.get_fastpath_enabled()],
        nn.modules.module._global_forward_hooks and "hooks",  # pyright: ignore[reportPrivateUsage]
    ]


def _of(add: Callable[[_Digest], None]) -> str:
    into = _Digest()
    add(into)
    return into.text()


class _Digest:
    """Of values, one after another."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        # by identity; what is in it stays alive, so that no identity is used again
        self._seen: dict[int, tuple[int, Any]] = {}

    def text(self) -> str:
        return self._hash.hexdigest()

    def model(self, model: nn.Module) -> None:
        """Of its structure: classes, attributes, hooks, and parameters and buffers without their values."""
        numbers: dict[int, int] = {}
        for _, module in model.named_modules():
            self._seen.setdefault(id(module), (len(self._seen), module))
        for path, module in model.named_modules(remove_duplicate=False):
            known = id(module) in numbers
            self._put("module", path, numbers.setdefault(id(module), len(numbers)), module.training)
            if known:
                continue
            self._class(type(module), path or "the model")
            for name, tensor in (*vars(module)["_parameters"].items(), *vars(module)["_buffers"].items()):
                if tensor is None:
                    self._put(name, None)
                else:
                    self._put(
                        name,
                        numbers.setdefault(id(tensor), len(numbers)),
                        isinstance(tensor, nn.Parameter),
                        *_kind(tensor),
                    )
            self._attributes(module, path)

    def buffers(self, model: nn.Module) -> None:
        """Of their values."""
        for name, buffer in model.named_buffers():
            self._put(name)
            self._values(buffer)

    def add(self, value: Any, where: str) -> None:
        """where: what it is, for people."""
        kind: Any = type(value)
        if value is None or value is Ellipsis or value is NotImplemented or (kind in _PLAIN):
            return self._put(kind.__name__, repr(value))
        if isinstance(value, enum.Enum):
            return self._put(kind.__module__, kind.__qualname__, value.name)
        if isinstance(value, _BY_TEXT):
            return self._put(kind.__name__, repr(value))
        if id(value) in self._seen:
            return self._put("again", self._seen[id(value)][0])
        self._seen[id(value)] = len(self._seen), value
        return self._add_new(value, where)

    def _add_new(self, value: Any, where: str) -> None:
        kind: Any = type(value)
        self._put(kind.__module__, kind.__qualname__)
        if isinstance(value, Tensor):
            self._put(*_kind(value))
            self._values(value)
        elif isinstance(value, numpy.ndarray):
            if value.dtype.hasobject:
                raise UnknownError(f"{where}, an array of objects,")
            self._put(
                str(value.dtype),
                value.shape,
                hashlib.blake2b(numpy.ascontiguousarray(value).tobytes()).hexdigest(),
            )
        elif isinstance(value, FunctionType):
            self._function(value, where)
        elif isinstance(value, type | GenericAlias):
            self._class(value, where) if isinstance(value, type) else self._put(repr(value))
        elif isinstance(value, MethodType):
            self.add(value.__func__, where)
            self.add(value.__self__, f"what {where} is a method of")
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords), where)
        elif isinstance(value, _OPERATORS):
            self._put(str(value))
        elif isinstance(value, _BUILT_IN):
            self._put(value.__qualname__)
            owner = getattr(value, "__self__", None)
            self._put(owner.__name__) if isinstance(owner, ModuleType) else self.add(
                owner, f"what {where} is a method of"
            )
        elif isinstance(value, ModuleType):
            self._put(value.__name__)
        elif isinstance(value, MappingProxyType):  # as fields of data classes have one
            self.add(dict(value), where)
        elif isinstance(value, logging.Logger):
            self._put(value.name)
        elif hasattr(value, "__wrapped__") and not hasattr(value, "__dict__"):  # functools.lru_cache
            self.add(value.__wrapped__, where)
        elif isinstance(value, weakref.ref):
            self.add(value(), where)
        elif isinstance(value, nn.Module):
            self.model(value)
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._put(name)
                self._values(tensor)
        else:
            self._object(value, where)

    def _object(self, value: Any, where: str) -> None:
        """A container or an instance of a class in Python, which has nothing besides items and attributes."""
        built_in = next(
            (each for each in (dict, list, tuple, set, frozenset, deque) if isinstance(value, each)), None
        )
        if isinstance(value, Mapping) and built_in is dict:
            self._put(len(value))
            for key, each in value.items():
                self.add(key, where)
                self.add(each, f"{where}[{key!r}]")
        elif built_in in (set, frozenset):
            self._put(*sorted(_of(lambda into, each=each: into.add(each, where)) for each in value))
        elif built_in is not None:
            self._put(len(value))
            for number, each in enumerate(value):
                self.add(each, f"{where}[{number}]")
        elif not _is_pure(value):
            raise UnknownError(f"{where}, a {type(value).__qualname__},")
        if type(value).__module__ not in ("builtins", "collections"):
            self._class(type(value), where)
        for name, each in _attributes_of(value):
            # Python's hashes are others in every process
            if not (isinstance(each, int) and name.startswith("_") and name.endswith("_hash")):
                self._put(name)
                self.add(each, f"{where}.{name}")

    def _attributes(self, module: nn.Module, path: str) -> None:
        for name, value in vars(module).items():
            if name not in TORCHS_OWN and name != "training":
                self._put(name)
                self.add(value, f"{path}.{name}" if path else name)
        for name in _HOOKS:
            for hook in vars(module).get(name, {}).values():
                self._put(name)
                self.add(hook, f"a hook of {path or 'the model'}")

    def _class(self, kind: type, where: str) -> None:
        """A package's is known by its name, but for what the user has put into it; and of a module's class
        the file that it is in."""
        for each in kind.__mro__[:-1]:
            if self._class_is_known(each):
                continue
            self._put("class", each.__module__, each.__qualname__)
            file = getattr(sys.modules.get(each.__module__), "__file__", None)
            own = _is_own(each.__module__, file or "<none>")
            if (
                issubclass(each, nn.Module)
                and not own
                and file
                and not each.__module__.startswith(("torch.", "meshloom."))
            ):
                self._put(digest_of(Path(file).read_bytes()))
            for name, value in vars(each).items():
                functions = [
                    found
                    for found in _functions_in(value)
                    if own or _is_own(found.__module__, found.__code__.co_filename)
                ]
                for function in functions:
                    self._put(name)
                    self.add(function, f"{each.__qualname__}.{name}")
                if own and not functions and name not in _OF_A_CLASS and not hasattr(type(value), "__get__"):
                    self._put(name)
                    self.add(value, f"{each.__qualname__}.{name}")

    def _class_is_known(self, kind: type) -> bool:
        known = -id(kind) in self._seen
        self._seen.setdefault(-id(kind), (len(self._seen), kind))
        return known

    def _function(self, function: FunctionType, where: str) -> None:
        self._put(function.__module__, function.__qualname__)
        for each in (function.__defaults__, function.__kwdefaults__):
            self.add(each, f"a default of {where}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                found = cell.cell_contents
            except ValueError:  # empty
                continue
            self._put(name)
            self.add(found, f"{name}, which {where} uses,")
        if not _is_own(function.__module__, function.__code__.co_filename):
            return
        self._code(function.__code__)
        reads = reads_of(function.__code__)
        for name in reads.names:
            if name in function.__globals__ and not name.startswith("__"):
                self._put(name)
                self._global(function.__globals__[name], f"{name}, which {where} uses,", reads)

    def _global(self, value: Any, where: str, reads: Reads) -> None:
        """Of a module of the user's what the code may take of it."""
        self.add(value, where)
        if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", None) or ""):
            for name in reads.attributes:
                if name in vars(value):
                    self._put(name)
                    self.add(vars(value)[name], f"{value.__name__}.{name}")

    def _code(self, code: CodeType) -> None:
        self._put(
            code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_flags
        )
        for each in code.co_consts:
            self._code(each) if isinstance(each, CodeType) else self.add(each, "a constant")

    def _values(self, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        for part in dense_parts(tensor):
            flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if flat.numel():
                self._hash.update(flat.view(torch.uint8).numpy().data)

    def _put(self, *facts: Any) -> None:
        self._hash.update(f"{facts!r}\n".encode())


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    plain = type(tensor) in (Tensor, nn.Parameter, FakeTensor) or isinstance(
        tensor, nn.Parameter | FakeTensor | nn.Buffer
    )
    if not plain or tensor.layout not in (torch.strided, torch.sparse_coo):
        raise UnknownError(f"a tensor, a {type(tensor).__qualname__} of layout {tensor.layout},")
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (
        tuple(tensor.shape),
        strides,
        str(tensor.dtype),
        str(tensor.layout),
        tensor.device.type,
        tensor.requires_grad,
    )


def _is_own(module: str | None, file: str) -> bool:
    """Whether code is the user's, also where it was typed in or made by `exec`."""
    if not file.startswith("<"):
        return is_users(file)
    there = getattr(sys.modules.get(module or ""), "__file__", None)
    return (
        there is None and module not in sys.builtin_module_names
        if not isinstance(there, str)
        else is_users(there)
    )


def _functions_in(value: Any) -> list[FunctionType]:
    """The functions that an entry of a class is."""
    if isinstance(value, property):
        found: list[Any] = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        found = [value.func]
    else:
        found = [getattr(value, "__func__", value)]
    return [each for each in found if isinstance(each, FunctionType)]


def _is_pure(value: Any) -> bool:
    """Whether all that an object is stands in its attributes: its class adds no memory of its own to that of
    Python's objects."""
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
