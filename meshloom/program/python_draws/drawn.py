"""A number or an array that was drawn: in Python it is an expression of draws, for torch an input of the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAYS_OUT, describe_line, place_here
from meshloom.program.python_draws.paths import Expression, function_of


class Following(Protocol):
    """Who follows the loss."""

    def test(self, drawn: Drawn) -> Any:
        """The outcome of a test: a bool, or a whole number."""
        ...

    def tensor(self, drawn: Drawn) -> Tensor:
        """The input that a number or an array is."""
        ...


class Drawn:
    """value: an example."""

    __array_priority__ = 2000  # above tensors' and arrays'

    def __init__(self, following: Following, expression: Expression, value: Any) -> None:
        self.following, self.expression, self.value = following, expression, value

    def made(self, name: str, *args: Any) -> Any:
        """The result of a function of this and others: another drawn value, or the outcome of a test."""
        if any(isinstance(each, Tensor) for each in args):
            tensors = as_tensors(args)
            return function_of(name)(*tensors)
        value = function_of(name)(*(each.value if isinstance(each, Drawn) else each for each in args))
        found = Drawn(self.following, (name, *map(expression_of, args)), value)
        return self.following.test(found) if isinstance(value, bool | numpy.bool_) else found

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = (index.start, index.stop, index.step)
            return self.made("numpy.array", self)._sliced(index)
        return self.made("getitem", self, index)

    def _sliced(self, index: tuple[Any, ...]) -> Any:
        start, stop, step = slice(*index).indices(len(self))
        return self.made("numpy.take", self, tuple(range(start, stop, step)), 0)

    def __bool__(self) -> bool:
        return bool(self.following.test(Drawn(self.following, ("truth", self.expression), bool(self.value))))

    def __int__(self) -> int:
        return int(self.following.test(self))

    __index__ = __int__

    def __float__(self) -> float:
        raise refused("the number itself is needed")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise refused("NumPy needs the number itself")

    def __hash__(self) -> int:
        raise refused("the number itself is needed")

    def __round__(self, digits: int | None = None) -> Any:
        return self.made("round", self, digits)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            raise refused(f"numpy.{ufunc.__name__} is called in a way that cannot be repeated")
        return self.made(f"numpy.{ufunc.__name__}", *args)

    def __array_function__(
        self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if kwargs or getattr(numpy, func.__name__, None) is not func:
            raise refused(f"numpy.{func.__name__} is called in a way that cannot be repeated")
        return self.made(f"numpy.{func.__name__}", *args)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "size", "dtype"):
            return getattr(numpy.asarray(self.value), name)
        if name in _METHODS and isinstance(self.value, numpy.ndarray | numpy.generic):
            return lambda *args: self.made(f"method.{name}", self, *args)
        raise AttributeError(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call_torch(func, args, kwargs or {})


_METHODS = {"sum", "mean", "min", "max", "copy", "reshape", "argsort", "cumsum", "item", "any", "all"}
_BINARY = "add sub mul truediv floordiv mod pow"
_UNARY = "neg abs pos invert"
_COMPARED = "lt le gt ge eq ne"
for _name in [*_BINARY.split(), *_COMPARED.split()]:
    setattr(Drawn, f"__{_name}__", lambda self, other, _name=_name: self.made(_name, self, other))
for _name in _BINARY.split():
    setattr(Drawn, f"__r{_name}__", lambda self, other, _name=_name: self.made(_name, other, self))
for _name in _UNARY.split():
    setattr(Drawn, f"__{_name}__", lambda self, _name=_name: self.made(_name, self))


def call_torch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of torch, with tensors in the places of drawn values."""
    if func in (torch.tensor, torch.as_tensor):
        return _made_tensor(args[0], **kwargs)
    if func is torch.full and isinstance(args[1], Drawn):
        return _made_tensor(args[1], **kwargs).expand(args[0]).clone()
    if func is Tensor.__getitem__ and isinstance(args[1], Drawn) and not args[1].ndim:
        return args[0].index_select(0, args[1].following.tensor(args[1]).reshape(1)).squeeze(0)
    args, kwargs = as_tensors(args), as_tensors(kwargs)
    return func(*args, **kwargs)


def as_tensors(tree: Any) -> Any:
    """The same with tensors in the places of drawn values. A number takes the precision of the tensors beside it, as
    Python's own do."""
    beside = next(
        (each for each in _leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()), None
    )
    dtype = beside.dtype if beside is not None else torch.get_default_dtype()

    def change(each: Any) -> Any:
        if isinstance(each, Drawn):
            tensor = each.following.tensor(each)
            return tensor.to(dtype) if tensor.is_floating_point() and not tensor.ndim else tensor
        if isinstance(each, Mapping):
            return {key: change(value) for key, value in each.items()}
        if type(each) in (list, tuple):
            return type(each)(change(value) for value in each)
        return each

    return change(tree)


def holds_drawn(tree: Any) -> bool:
    """Whether there is a drawn value among arguments."""
    return any(isinstance(each, Drawn) for each in _leaves(tree))


def expression_of(value: Any) -> Expression:
    """The expression of a drawn value or of a constant."""
    if isinstance(value, Drawn):
        return value.expression
    if isinstance(value, numpy.ndarray):
        return ("numpy.array", ("constant", _plain(value.tolist())))
    if isinstance(value, list | tuple) and holds_drawn(value):
        raise refused("it is in a list that NumPy is given")
    return ("constant", _plain(value))


def refused(why: str) -> CaptureError:
    """The error for a use of a drawn value that no program can follow."""
    line = describe_line(place_here(2).line)
    return CaptureError(
        f"What {line} draws with random or numpy, or meshloom.step(), becomes an input of the program, and there {why}. "
        f"Compute with it by +, -, *, /, **, comparisons, math or numpy functions, or make a tensor of it first (torch.tensor(r)). {WAYS_OUT}"
    )


def _made_tensor(data: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    if isinstance(data, Drawn):
        data = data.following.tensor(data) if data.ndim else as_tensors((data,))[0]
    if isinstance(data, list | tuple):
        return torch.stack([_made_tensor(each, dtype) for each in data])
    return data.to(dtype) if isinstance(data, Tensor) and dtype else torch.as_tensor(data, dtype=dtype)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if type(tree) in (list, tuple):
        for each in tree:
            yield from _leaves(each)
    else:
        yield tree


def _plain(value: Any) -> Any:
    """A literal."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, range):
        return tuple(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise refused(f"a {type(value).__name__} is an argument")
