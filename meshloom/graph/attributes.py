"""The plain Python attributes of a model's modules: numbers, text and lists of them, which a program cannot change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

Changed = tuple[str, str, str, str]  # module, attribute, before, after

_TORCHS_OWN = set(vars(nn.Module())) - {"training"}


def plain_attributes(model: nn.Module) -> dict[tuple[str, str], str]:
    """(module, attribute) -> its value as text, for all that are plain values."""
    return {
        (name, attribute): text
        for name, module in model.named_modules()
        for attribute, value in list(vars(module).items())
        if attribute not in _TORCHS_OWN and (text := _text(value)) is not None
    }


def plain_values(model: nn.Module) -> dict[tuple[str, str], Any]:
    """The same values themselves; lists and the like are copies."""
    return {(name, attribute): copy.copy(vars(model.get_submodule(name))[attribute]) for name, attribute in plain_attributes(model)}


@contextmanager
def whole_attributes(model: nn.Module) -> Iterator[None]:
    """Tensors that the forward leaves in plain attributes are gone afterwards: they hold no values."""
    kept = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in kept:
            for name, value in list(vars(module).items()):
                if name not in _REGISTERED and value is not attributes.get(name) and _holds_tensor(value):
                    if name in attributes:
                        vars(module)[name] = attributes[name]
                    else:
                        del vars(module)[name]


def changed_attributes(before: dict[tuple[str, str], str], after: dict[tuple[str, str], str]) -> list[Changed]:
    """What differs; an attribute that was not there before is not a change, as nothing can have read it."""
    return [(*place, text, after.get(place, "nothing")) for place, text in before.items() if after.get(place, "nothing") != text]


def _text(value: Any, depth: int = 0) -> str | None:
    """A text that is equal for equal plain values; None for other objects."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, numpy.ndarray):
        return f"array {value.dtype} {value.shape} {hash(value.tobytes())}"
    if depth > 3 or isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        parts = [(repr(key), _text(each, depth + 1)) for key, each in value.items()]
        return None if any(text is None for _, text in parts) else "{" + ", ".join(f"{key}: {text}" for key, text in parts) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        texts = [_text(each, depth + 1) for each in value]
        return None if any(text is None for text in texts) else f"{type(value).__name__}[{', '.join(map(str, texts))}]"
    return None


_REGISTERED = {"_parameters", "_buffers", "_modules"}


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0])
