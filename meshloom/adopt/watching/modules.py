"""A module's own method that trains it: `net.fit(loader)`."""

from __future__ import annotations

import ast

from meshloom.adopt.watching.passes import SeenFrame
from meshloom.adopt.watching.source import PythonSource

NUMBERS = (bool, int, float, str, type(None))


def with_numbers_of_module(source: PythonSource, frame: SeenFrame) -> PythonSource:
    """The file with the values of `self.lr`, `self.epochs` in place of these in the method of `frame`: a job has numbers, and
    no module, where it says how to train. Those that the method changes stay."""
    function = source.function(frame.function, frame.line)
    if function is None:
        return source
    found = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]
    stored = {each.attr for each in found if not isinstance(each.ctx, ast.Load)}
    held = vars(frame.values["self"])
    edits: list[tuple[ast.AST, str]] = [
        (each, repr(held[each.attr]))
        for each in found
        if each.attr not in stored
        and each.attr != "training"
        and isinstance(held.get(each.attr, ...), NUMBERS)
    ]
    return PythonSource(source.path, source.replaced(edits)) if edits else source
