"""A model's plain Python attributes: numbers, texts and lists of them, which a program cannot change."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.program.ir.nodes import submodule

TORCHS_OWN = set(vars(nn.Module())) - {"training"}


def plain_values(model: nn.Module) -> dict[tuple[str, str], Any]:
    """(module, attribute) -> its value, for all plain values; containers are copied."""
    return {
        (name, attribute): copy.copy(value)
        for name, module in model.named_modules()
        for attribute, value in list(vars(module).items())
        if attribute not in TORCHS_OWN and plain_text(value) is not None
    }


def put_attribute(model: nn.Module, path: str, name: str, value: Any) -> None:
    """Gives an attribute a value of `plain_values`; a container keeps its identity, as hooks may refer to it."""
    attributes = vars(submodule(model, path))
    attributes[name] = _filled(attributes.get(name), value)


def _filled(container: Any, content: Any) -> Any:
    """The container with this content, if it is of its kind; else the content."""
    mutable = isinstance(content, dict | list | set | deque) and type(container) is type(content)
    if mutable and container is not content:
        kept: Any = copy.copy(content)
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(kept)
    return container if mutable else content


@contextmanager
def containers_kept(model: nn.Module) -> Iterator[None]:
    """Containers in attributes are the same objects afterwards: an export puts copies in their places."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in list(vars(module).items()):
                if name not in TORCHS_OWN and name in attributes:
                    vars(module)[name] = _filled(attributes[name], value)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Removes tensors without values that the forward leaves in plain attributes, or in containers there."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    own = [value for _, values in before for name, value in values.items() if name not in TORCHS_OWN]
    containers = list(_containers(own))
    tensors_before = [{id(leaf) for leaf in _tensors_in(container)} for container in containers]
    contents = [copy.copy(container) for container in containers]
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in list(vars(module).items()):
                if name in _REGISTERED or value is attributes.get(name):
                    continue
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    if name in attributes:
                        vars(module)[name] = attributes[name]
                    else:
                        del vars(module)[name]
        for container, tensors, content in zip(containers, tensors_before, contents, strict=True):
            # the forward has added tensors
            if any(id(leaf) not in tensors for leaf in _tensors_in(container)):
                container.clear()
                extend = container.extend if isinstance(container, list | deque) else container.update
                extend(content)


def plain_text(value: Any, depth: int = 0) -> str | None:
    """A text that is equal for equal plain values; None for other objects."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, numpy.ndarray):
        return f"array {value.dtype} {value.shape} {hash(value.tobytes())}"
    if depth > 3 or isinstance(value, Tensor):
        return None
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return None
    texts = [plain_text(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    if None in texts:
        return None
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(value, texts, strict=True)) + "}"
    return f"{type(value).__name__}[{', '.join(map(str, texts))}]"


_REGISTERED = {"_parameters", "_buffers", "_modules"}
_DEPTH = 4  # of containers in containers


def _containers(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """The lists, dicts, sets and deques among `values`, inner ones first."""
    for value in values if depth <= _DEPTH else ():
        if isinstance(value, dict | list | deque | set | tuple):
            yield from _containers(list(value.values() if isinstance(value, dict) else value), depth + 1)
            if not isinstance(value, tuple):
                yield value


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | deque | set | tuple) and depth <= _DEPTH:
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors_in(each, depth + 1)
