"""How a program treats what a batch holds besides tensors: as an input, as a constant that the program is
specialized to, or not at all.

    {"x": tensor, "sigma": 0.3, "task": "copy", "files": [...]}    loss: x * sigma, if batch["task"] == "copy"
      x * sigma        only computes with it: `sigma` is an input
      task == "copy"   reads it in Python: captured again with the text itself, the program is for that text
      files            is never read, so it may be anything

This is determined by capturing. At first every number is a tensor without dims, and everything else an object
that reports when it is read. A number that Python needs (`range(n)`, `math.sqrt(sigma)`) makes a capture
fail: then ints are constants like the text from then on, and if it still fails floats are, too.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, NoReturn, TypeVar

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.nodes import Input
from meshloom.program.ir.step_input import STEP, step_tensor

T = TypeVar("T")
# name of a value -> what it must be for a program: `text_of` it, or the kind of an input; None: anything
Others = dict[str, str | None]


def fits(others: Mapping[str, str | None], values: Mapping[str, Any]) -> bool:
    """Whether a program of `others` applies to a batch with `values` (and tensors of its shapes)."""
    if list(others) != list(values):
        return False
    return all(
        wanted in (None, _kind(values[name]) if wanted in _KINDS else text_of(values[name]))
        for name, wanted in others.items()
    )


def tensor_of(leaves: Leaves, each: Input, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor for an input. dtype: of floating-point numbers in the batch; default: the input's own."""
    if each.name == STEP:
        return step_tensor(leaves.device)
    if each.name in leaves.tensors:
        return leaves.tensors[each.name]
    own = each.meta.dtype
    wanted = dtype if dtype and own.is_floating_point else own
    return torch.tensor(leaves.values[each.name], dtype=wanted, device=leaves.device)


def read_values(leaves: Leaves, read: Callable[[Leaves], T], *, numbers: bool = True) -> tuple[T, Others]:
    """The result of `read` for a batch, and how it treats its values besides tensors.

    read: called once or more, with a batch whose tensors include numbers. numbers: whether these may be
        inputs.
    Raises what `read` raises with all values as they are, and `CaptureError` where the loss reads an object
    whose equality cannot be decided.
    """
    values = leaves.values
    if not values:
        return read(leaves), {}
    for name, value in values.items():
        if any(isinstance(each, numpy.ndarray) for each in tree_leaves(value)):
            raise CaptureError(
                f"{name} of the batch is a NumPy array, and a program computes with tensors. Make it a tensor in collate, torch.from_numpy({name}). {WAY_OUT}"
            )
    touched: dict[str, None] = {}
    fixed = {
        name for name, value in values.items() if _is_always_fixed(value) or (not numbers and _kind(value))
    }

    def attempt(fixed: set[str]) -> tuple[T | None, Exception | None]:
        touched.clear()
        try:
            return read(_view(leaves, fixed, touched)), None
        except Exception as error:  # whatever a tensor in the place of a number causes
            return None, error

    def result(found: T | None) -> tuple[T, Others]:
        assert found is not None
        return found, {
            name: text_of(value) if name in fixed else _kind(value) for name, value in values.items()
        }

    while True:
        found, failed = attempt(fixed)
        if touched:
            fixed |= touched.keys()
            for name in touched:
                _check_stable(name, values[name])
            continue
        if failed is None:
            return result(found)
        rest = {name: _kind(value) for name, value in values.items() if name not in fixed}
        if not rest:
            raise failed
        # an int more often says how large or how often something is
        tried = next(
            filter(None, ([name for name in rest if rest[name] == kind] for kind in ("an int", "a float"))),
            [*rest],
        )
        for name in tried:
            _check_stable(name, values[name])
        fixed.update(tried)


def text_of(value: Any) -> str | None:
    """A text that is equal for equal values, in every process; None for objects without one.

    >>> text_of({"a": [1, 2.5, "b"], "c": None})
    "{'a': [1, 2.5, 'b'], 'c': None}"
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return _short(repr(value), 200)
    if isinstance(value, torch.dtype | torch.device | torch.Size | range | slice | numpy.generic):
        return repr(value)
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return f"array {value.dtype} {value.shape} {_hash(value.tobytes())}"
    if isinstance(value, Tensor):
        return f"tensor {value.dtype} {value.tolist()}" if value.numel() <= 10_000 else None
    if isinstance(value, Mapping):
        pairs = [(text_of(key), text_of(each)) for key, each in value.items()]
        text = ", ".join(f"{key}: {each}" for key, each in pairs)
        return None if any(None in pair for pair in pairs) else _short("{" + text + "}")
    if isinstance(value, set | frozenset):
        texts = [text_of(each) for each in value]
        return None if None in texts else _short("{" + ", ".join(sorted(map(str, texts))) + "}")
    if isinstance(value, list | tuple):
        texts = [text_of(each) for each in value]
        left, right = "[]" if isinstance(value, list) else "()"
        return None if None in texts else _short(f"{left}{', '.join(map(str, texts))}{right}")
    return None


def with_other_numbers(
    leaves: Leaves, others: Mapping[str, str | None], values: Mapping[str, Any], *, moved: bool
) -> Any:
    """The batch with the `values` that a program is specialized to. moved: also change numeric inputs."""
    given = {name: values[name] for name in specialized_to(others)}
    if moved:
        given |= {name: _moved(leaves.values[name]) for name, wanted in others.items() if wanted in _KINDS}
    return leaves.rebuild(list(leaves.tensors.values()), given)


def stand_ins(others: Mapping[str, str | None], leaves: Leaves) -> dict[str, Any]:
    """Name -> the tensor that replaces a number that is an input, for a program captured by shapes."""
    return {
        name: torch.tensor(leaves.values[name], dtype=_dtype(wanted))
        for name, wanted in others.items()
        if wanted in _KINDS
    }


def takes_numbers(others: Mapping[str, str | None]) -> bool:
    """Whether numbers of the batch are inputs."""
    return any(wanted in _KINDS for wanted in others.values())


def check_following(others: Mapping[str, str | None], following: Mapping[str, Any]) -> None:
    """Raise `CaptureError` if a list, an array or a float that the program is specialized to differs in the
    second batch: then it would differ in every batch."""
    for name, wanted in specialized_to(others).items():
        value = following.get(name)
        few = value is None or isinstance(
            value, bool | int | str | bytes | enum.Enum | torch.dtype | torch.device | torch.Size
        )
        if not few and text_of(value) != wanted:
            raise refused_value(name, value, "it differs in the next batch")


def refused_value(name: str, value: Any, why: str) -> CaptureError:
    """The error for a value that changes too often for one program per value."""
    kind = type(value).__name__ + (f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else "")
    return CaptureError(
        f"The loss reads {name} of the batch, a {kind}, in Python, and {why}: a program is specialized to the value it was captured with. "
        f"Make a tensor of it in collate. {WAY_OUT}"
    )


class ReadError(Exception):
    """A stand-in for a value of the batch was used in Python."""


class _Unread:
    """A stand-in for a value of the batch that reports when it is read. Passing it on is not reading it."""

    def __init__(self, name: str, touched: dict[str, None]) -> None:
        object.__setattr__(self, "_Unread__noted", (name, touched))

    def __getattribute__(self, name: str) -> Any:
        _note(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs or {})):
            if type(each) is cls:
                _note(each)
        raise ReadError


def _note(unread: _Unread) -> NoReturn:
    name, touched = object.__getattribute__(unread, "_Unread__noted")
    touched[name] = None
    raise ReadError(name)


def _noting(self: _Unread, *args: Any, **kwargs: Any) -> Any:
    _note(self)


_SPECIAL = """
    abs add and bool bytes call ceil complex contains delattr delitem divmod enter eq exit float floor floordiv format ge getitem gt hash iadd iand
    ifloordiv ilshift imatmul imod imul index int invert ior ipow irshift isub iter itruediv ixor le len lshift lt matmul mod mul ne neg next or pos
    pow radd rand rdivmod repr reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setattr setitem str sub
    truediv trunc xor
"""
for _name in _SPECIAL.split():
    setattr(_Unread, f"__{_name}__", _noting)  # Python looks these up in the class


_KINDS = ("a float", "an int")


def specialized_to(others: Mapping[str, str | None]) -> dict[str, str]:
    """The values that a program is specialized to, and their texts."""
    return {name: wanted for name, wanted in others.items() if wanted is not None and wanted not in _KINDS}


def _kind(value: Any) -> str | None:
    """Kind of a number that can be an input; None for other values."""
    if isinstance(value, bool | enum.Enum):
        return None
    if isinstance(value, float | numpy.floating):
        return "a float"
    return "an int" if isinstance(value, int | numpy.integer) and -(2**63) <= int(value) < 2**63 else None


def _dtype(kind: str) -> torch.dtype:
    return torch.get_default_dtype() if kind == "a float" else torch.int64


def _is_always_fixed(value: Any) -> bool:
    """Whether code tests a value with `is`, which no stand-in can notice, or needs the value itself."""
    return value is None or isinstance(value, Tensor | bool | enum.Enum | torch.dtype)


def _check_stable(name: str, value: Any) -> None:
    if text_of(value) is None:
        kind = f"{type(value).__name__}, " + (
            "a dataclass" if is_dataclass(value) else "an object that meshloom cannot compare for equality"
        )
        raise CaptureError(
            f"The loss reads {name} of the batch, a {kind}: a program would keep its value in the first batch for ever. "
            f"Put its tensors and numbers into the batch themselves, in dicts, lists or dataclasses. {WAY_OUT}"
        )


def _view(leaves: Leaves, fixed: set[str], touched: dict[str, None]) -> Leaves:
    """The batch with its numbers as tensors, the fixed values, and unreadable stand-ins for the rest."""
    numbers: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in leaves.values.items():
        if name in fixed:
            rest[name] = value
        elif kind := _kind(value):
            numbers[name] = torch.tensor(value, dtype=_dtype(kind), device=leaves.device)
        else:
            rest[name] = _Unread(name, touched)

    def rebuild(tensors: Any, others: Mapping[str, Any] | None = None) -> Any:
        given = list(tensors)
        count = len(leaves.tensors)
        as_numbers = dict(zip(numbers, given[count:], strict=True))
        return leaves.rebuild(given[:count], {**rest, **as_numbers, **(others or {})})

    return Leaves({**leaves.tensors, **numbers}, rebuild, {})


def _moved(number: Any) -> Any:
    """Another number of similar size: an index stays valid."""
    if _kind(number) == "a float":
        return number * 0.75 if number else 0.25
    return number - 1 if number > 0 else number + 1


def _short(text: str, length: int = 2000) -> str:
    return text if len(text) < length else f"{text[:40]}... {_hash(text.encode())}"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
