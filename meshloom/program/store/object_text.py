"""Objects as text that is equal where they are: plain values as Python writes them, tensors with a hash of their elements, functions
and classes by their names, other objects as pickle would store them."""

from __future__ import annotations

import copyreg
import sys
import weakref
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshloom.core.cache import digest_of
from meshloom.core.modules.class_code import reads_of
from meshloom.core.modules.packages import is_users
from meshloom.program.ir.sparse_constants import bits_of, dense_parts
from meshloom.program.trace.attributes import TORCHS_OWN

MOST_LETTERS = 4000  # of a value; a longer one ends in a hash
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (type(None), type(...), bool, int, float, complex, str, bytes)
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


class NoTextError(Exception):
    """Raised for an object that no text stands for. what: its description, as the beginning of a sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class ObjectText:
    """Texts of several objects; one that was met before is named by its place then.

    files: the user's, whose contents are compared apart; None: functions and classes count by their names alone. reads: lines
    on what functions and classes in these files read: closures, defaults, globals, class attributes.
    """

    def __init__(self, files: Container[str] | None = None) -> None:
        self.reads: list[str] = []
        self._files, self._own = files, files or ()
        self._named: dict[Any, str] = {}  # functions and classes
        # id -> (place, object); holding the objects keeps their ids unique
        self._met: dict[int, tuple[str, Any]] = {}

    def of(self, value: Any, where: str) -> str:
        """The text of a value. where: its description in error messages. Raises `NoTextError`."""
        if type(value) in _SCALARS or isinstance(value, _BY_REPR):
            return _shortened(repr(value))
        if self._files is None and isinstance(value, type | FunctionType):
            return f"{value.__module__}:{value.__qualname__}"
        try:
            if isinstance(value, type):
                return self._of_class(value, where)
            if isinstance(value, FunctionType):
                return self._named.get(value) or self._of_function(value, where)
            if id(value) in self._met:
                return f"<{self._met[id(value)][0]}>"
            self._met[id(value)] = where, value
            return _shortened(self._new(value, where))
        except RecursionError as error:
            raise NoTextError(f"{where}, which is nested deeply,") from error

    def module(self, model: nn.Module, root: str = "the model", *, values: bool = True) -> str:
        """Lines on the structure: classes, modes, plain attributes, hooks, and kinds of parameters and buffers. values: of
        buffers too."""
        lines: list[str] = []
        named = [(path or root, each) for path, each in model.named_modules(remove_duplicate=False)]
        for path, module in named:
            self._met.setdefault(id(module), (path, module))
        for path, module in named:
            first = self._met[id(module)][0]
            if first != path:  # one module of two names
                lines.append(f"{path}: <{first}>")
                continue
            lines.append(f"{path}: {self.of(type(module), path)}{'' if module.training else ', evaluating'}")
            attributes = vars(module)
            for kind in ("_parameters", "_buffers"):
                for name, tensor in attributes[kind].items():
                    known = self._met.setdefault(id(tensor), (f"{path}.{name}", tensor))[0]
                    tie = known != f"{path}.{name}" and tensor is not None
                    text = f"<{known}>" if tie else _of_tensor(tensor, name, values and kind == "_buffers")
                    lines.append(f"{path}.{name}: {text}")
            for name, value in attributes.items():
                if name not in TORCHS_OWN and name != "training":
                    lines.append(f"{path}.{name} = {self.of(value, f'{path}.{name}')}")
            for name in _HOOKS:
                hooks = attributes.get(name, {}).values()
                lines += [f"{path}.{name}: {self.of(hook, f'a hook of {path}')}" for hook in hooks]
        return "\n".join(lines)

    def _new(self, value: Any, where: str) -> str:
        kind: Any = type(value)
        if isinstance(value, Tensor):
            return _of_tensor(value, where, True)
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            elements = numpy.ascontiguousarray(value).tobytes()
            return f"array {value.dtype} {list(value.shape)} {_hash(elements)}"
        if isinstance(value, nn.Module):
            parameters = [_of_tensor(each, name, True) for name, each in value.named_parameters()]
            return "\n".join([self.module(value, where), *parameters])
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, weakref.ref):
            return self.of(value(), where)
        if kind is dict:
            entries: Any = value
            texts = (
                f"{self.of(key, where)}: {self.of(each, f'{where}[{key!r}]')}"
                for key, each in entries.items()
            )
            return f"{{{', '.join(texts)}}}"
        if kind in (list, tuple, set, frozenset):
            found = [self.of(each, f"{where}[{number}]") for number, each in enumerate(value)]
            text = ", ".join(found if kind in (list, tuple) else sorted(found))
            return f"[{text}]" if kind is list else f"({text})" if kind is tuple else f"{{{text}}}"
        return self._as_stored(value, where)

    def _as_stored(self, value: Any, where: str) -> str:
        """What pickle would store of an object: what makes it, of which arguments, its state and items."""
        try:
            found = value.__reduce_ex__(2)
            parts = [list(each) if isinstance(each, Iterator) else each for each in found]
        except Exception as error:  # as of locks and files; the user's may raise anything
            raise NoTextError(f"{where}, a {type(value).__qualname__},") from error
        if isinstance(found, str):  # a built-in function, or one of `lru_cache`
            inner = getattr(value, "__wrapped__", None)
            return f"{value.__module__}:{found}" if inner is None else self.of(inner, where)
        if parts[0] is copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
            parts[:2] = [parts[1][0], parts[1][1:] or None]
        if len(parts) > 2 and isinstance(parts[2], dict):  # hashes of texts are others in every process
            parts[2] = {key: each for key, each in parts[2].items() if not str(key).endswith("_hash")}
        return " ".join(self.of(each, where) for each in parts if each is not None)

    def _of_function(self, function: FunctionType, where: str) -> str:
        code, file = function.__code__, function.__code__.co_filename
        if file.startswith("<") and not file.startswith("<frozen "):
            raise NoTextError(f"{where}, whose code is in no file,")
        self._check_imported(file, where)
        # where it ends: two lambdas may be in one line
        line, column = max((end or 0, column or 0) for _, end, _, column in code.co_positions())
        name = f"{function.__module__}:{function.__qualname__} ({Path(file).name}:{line}:{column})"
        name = self._name(function, name)
        read: dict[str, Any] = {}
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # empty
                read[variable] = cell.cell_contents
        if function.__defaults__ or function.__kwdefaults__:
            read["defaults"] = (function.__defaults__, function.__kwdefaults__)
        if file in self._own:
            reads = reads_of(code)
            for each in reads.names:
                if each in function.__globals__ and not each.startswith("__"):
                    value = read[each] = function.__globals__[each]
                    if isinstance(value, ModuleType) and _file_of(value.__name__) in self._own:
                        inner = {one: vars(value)[one] for one in reads.attributes if one in vars(value)}
                        read |= {f"{each}.{one}": found for one, found in inner.items()}
        self._put(name, read, function.__qualname__)
        return name

    def _of_class(self, kind: type, where: str) -> str:
        """Its name. What the user's classes hold are lines of `reads`, and what the user has put into a package's."""
        for each in kind.__mro__[:-1]:
            if each in self._named:
                continue
            name = self._name(each, f"{each.__module__}:{each.__qualname__}")
            file, root = map(_file_of, (each.__module__, each.__module__.partition(".")[0]))
            if not file and not root and each.__module__ not in sys.builtin_module_names:
                raise NoTextError(f"{where}, whose class {each.__qualname__} is in no file,")
            self._check_imported(file, where)
            read: dict[str, Any] = {}
            for attribute, value in vars(each).items():
                made = attribute.startswith("__") or attribute == "_abc_impl"  # by Python, or by `dataclass`
                function, own = _function_of(value), file in self._own and not made
                if function and (own or function.__code__.co_filename in self._own):
                    read[attribute] = function
                elif own and not hasattr(type(value), "__get__") and not isinstance(value, each):
                    read[attribute] = value
            self._put(name, read, each.__qualname__)
        return self._named.get(kind, "object")

    def _name(self, value: Any, name: str) -> str:
        """Its name, with a number if others have it: a function with another closure, a class made by a function."""
        others = sum(each.partition(" #")[0] == name for each in self._named.values())
        return self._named.setdefault(value, f"{name} #{others}" if others else name)

    def _put(self, name: str, read: dict[str, Any], where: str) -> None:
        """Add a line for each value that a function or class reads."""
        self.reads += [
            f"{name} reads {each} = {self.of(value, f'{each} in {where}')}" for each, value in read.items()
        ]

    def _check_imported(self, file: str, where: str) -> None:
        if file and is_users(file) and file not in self._own:
            raise NoTextError(f"{where}, whose file {file} is no imported module's,")


def _of_tensor(tensor: Tensor | None, where: str, values: bool) -> str:
    """Kind and shape; values: a hash of its elements too, if it has any."""
    if tensor is None:
        return "None"
    plain = type(tensor) is Tensor or isinstance(tensor, nn.Parameter | FakeTensor | nn.Buffer)
    if not plain or tensor.layout not in (torch.strided, torch.sparse_coo):
        raise NoTextError(f"{where}, a {type(tensor).__qualname__} of layout {tensor.layout},")
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
    text = f"{kind} {tensor.dtype} {list(tensor.shape)} {tensor.layout} {tensor.device.type}"
    if tensor.layout is torch.strided:
        text += f" strides {list(tensor.stride())}"
    if tensor.requires_grad:
        text += ", trained"
    if values and not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        # an attribute that lies in the memory of a parameter has none yet, and cannot be resized once it was an array
        parts = [each for each in dense_parts(tensor) if each.untyped_storage().nbytes()]
        text += "".join(f", {_hash(bits_of(each).numpy().tobytes())}" for each in parts)
    return text


def _function_of(value: Any) -> FunctionType | None:
    """The function in a class attribute: of a property, a cached one, a method."""
    value = getattr(value, "fget", None) or getattr(value, "func", value)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:100]} ... ({len(text)} letters, {_hash(text)})"


def _hash(content: str | bytes) -> str:
    return digest_of(content)[:32]
