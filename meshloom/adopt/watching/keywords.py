"""The keywords of a call one by one, also those of `**settings`, `**vars(args)` and `**asdict(config)`."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from meshloom.adopt.watching.source import PythonSource, method

PLAIN = (bool, int, float, str, type(None), tuple, list, dict)


@dataclass(frozen=True)
class Keywords:
    """texts: by keyword. unknown: an expression of a dict whose keys the text does not tell."""

    texts: dict[str, str]
    unknown: str | None = None

    def of(self, name: str, default: str | None) -> str | None:
        """The text of a parameter; None where it is not given."""
        if name in self.texts or self.unknown is None:
            return self.texts.get(name, default)
        return f'{self.unknown}["{name}"]' if default is None else f'{self.unknown}.get("{name}", {default})'

    def rest(self, names: list[str]) -> str:
        """Of those that are no parameters, as a dict."""
        items = [f'"{name}": {text}' for name, text in self.texts.items() if name not in names]
        if self.unknown is not None:
            items.append(f"**{{key: value for key, value in {self.unknown}.items() if key not in {names!r}}}")
        return f"{{{', '.join(items)}}}"


def keywords_of(source: PythonSource, call: ast.Call, values: Mapping[str, Any]) -> Keywords | None:
    """values: of the names where the call is. None where two dicts are given whose keys are not known."""
    texts: dict[str, str] = {}
    unknown: list[str] = []
    for each in call.keywords:
        if each.arg is not None:
            texts[each.arg] = source.segment(each.value)
            continue
        found = _items(source, each.value, values)
        if found is None:
            unknown.append(source.segment(each.value))
        else:
            texts |= found
    if len(unknown) > 1:
        return None
    return Keywords(texts, unknown[0] if unknown else None)


def _items(source: PythonSource, node: ast.expr, values: Mapping[str, Any]) -> dict[str, str] | None:
    """Texts by keyword of what stands behind `**`."""
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
        if all(isinstance(key, ast.Constant) for key, _ in pairs):
            return {
                str(key.value): source.segment(value) for key, value in pairs if isinstance(key, ast.Constant)
            }
        return None
    if isinstance(node, ast.Call) and method(node) == "dict" and not node.args:
        found = keywords_of(source, node, values)
        return found.texts if found is not None and found.unknown is None else None
    if isinstance(node, ast.Name) and isinstance(held := values.get(node.id), dict):
        return {name: _name_of(value, values) or f'{node.id}["{name}"]' for name, value in held.items()}
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.Name):
        name = node.args[0].id
        held = values.get(name)
        if method(node) == "vars" and (isinstance(held, argparse.Namespace) or is_dataclass(held)):
            return {each: f"{name}.{each}" for each in vars(held)}
        if method(node) == "asdict" and is_dataclass(held):
            return {each.name: f"{name}.{each.name}" for each in fields(held)}
    return None


def _name_of(value: Any, values: Mapping[str, Any]) -> str | None:
    """The name of a thing that is no plain number, text or collection."""
    if isinstance(value, PLAIN):
        return None
    return next((name for name, each in values.items() if each is value and name.isidentifier()), None)
