"""Plain Python values as JSON, and back without loss: values that JSON lacks become an object with one key,
their type.

Nothing is pickled: only values are read back, never code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class NotPlainError(ValueError):
    """A value that JSON cannot represent; `str()` says where it is and its type."""


def to_json(value: Any, where: str = "") -> Any:
    """Encodes None, booleans, numbers, strings, small tensors, and lists, tuples, sets and dicts of them.
    Raises `NotPlainError`.

    >>> to_json({"lr": 0.1, "betas": (0.9, math.inf)})
    {'dict': [['lr', 0.1], ['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, list):
        return [to_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        return {
            "tuple" if isinstance(value, tuple) else "set": [
                to_json(each, f"{where}[{index}]") for index, each in enumerate(value)
            ]
        }
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [
                [to_json(key, where), to_json(each, f"{where}.{key}" if where else str(key))]
                for key, each in value.items()
            ]
        }
    if isinstance(value, Tensor) and value.numel() <= 1000:
        return {
            "tensor": to_json(value.detach().cpu().tolist(), where),
            "dtype": str(value.dtype).removeprefix("torch."),
        }
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return to_json(value.item(), where)
    raise NotPlainError(f"{where or 'it'} is a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`. Raises `NotPlainError` for anything else."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"float": text}:
            return float(text)
        case {"tuple": items}:
            return tuple(from_json(items))
        case {"set": items}:
            return set(from_json(items))
        case {"counter": items}:
            return Counter(dict(from_json(items)))
        case {"dict": items}:
            return dict(from_json(items))
        case {"tensor": items, "dtype": dtype}:
            return torch.tensor(from_json(items), dtype=getattr(torch, dtype))
        case _:
            raise NotPlainError(f"{list(value)} is no value that was written here")
