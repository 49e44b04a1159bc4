"""Plain numbers that a module keeps, as `model.num_classes`, and a module's own method that trains it: `net.fit(loader)`."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from meshloom.adopt.watching.passes import SeenFrame
from meshloom.adopt.watching.source import PythonSource, Replacement

NUMBERS = (bool, int, float, str, type(None))


def with_numbers_of_module(source: PythonSource, frame: SeenFrame) -> PythonSource:
    """The file with the values of `self.lr`, `self.epochs` in place of these in the method of `frame`: a job has numbers, and
    no module, where it says how to train."""
    function = source.function(frame.function, frame.line)
    edits = list(numbers_within(function, {"self": frame.values["self"]})) if function is not None else []
    return PythonSource(source.path, source.replaced(edits)) if edits else source


def numbers_within(node: ast.AST, modules: Mapping[str, Any]) -> Iterator[Replacement]:
    """The values of attributes of the modules, by name, in place of these; but for those that a method changes, or the node."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in modules:
            module = modules[each.value.id]
            value = vars(module).get(each.attr, ...)
            stored = {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load)
            }
            if isinstance(value, NUMBERS) and each.attr not in stored | _changing(type(module)):
                yield each, repr(value)


def _changing(kind: type[nn.Module]) -> set[str]:
    """Attributes that methods store, but for those of `__init__`."""
    return {"training"} | {
        str(one.argval)
        for each in kind.__mro__
        if not each.__module__.startswith("torch.") and each is not object
        for name, method in vars(each).items()
        if isinstance(method, types.FunctionType) and name != "__init__"
        for one in dis.get_instructions(method)
        if one.opname == "STORE_ATTR"
    }
