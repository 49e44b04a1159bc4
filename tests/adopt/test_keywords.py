"""What a call is given behind `**`, keyword by keyword."""

from __future__ import annotations

import argparse
import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshloom.adopt.watching.keywords import Keywords, keywords_of
from meshloom.adopt.watching.source import PythonSource


@dataclass
class Settings:
    lr: float = 0.1
    steps: int = 3


MODEL = object()
VALUES: dict[str, Any] = {
    "model": MODEL, "cfg": {"net": MODEL, "lr": 0.1}, "args": argparse.Namespace(epochs=2), "settings": Settings(),
}  # fmt: skip


def keywords(text: str) -> Keywords | None:
    source = PythonSource(Path("script.py"), text)
    node = source.tree.body[0]
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return keywords_of(source, node.value, VALUES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("T(lr=0.5, **cfg)", {"lr": 'cfg["lr"]', "net": "model"}),
        ("T(**vars(args))", {"epochs": "args.epochs"}),
        ("T(**asdict(settings))", {"lr": "settings.lr", "steps": "settings.steps"}),
        ("T(**{'lr': 1 / 3})", {"lr": "1 / 3"}),
        ("T(**dict(lr=1, **vars(args)))", {"lr": "1", "epochs": "args.epochs"}),
    ],
)
def test_each_keyword_has_a_text(text: str, expected: dict[str, str]) -> None:
    assert keywords(text) == Keywords(expected)


def test_of_an_unknown_dict_each_parameter_is_asked_for() -> None:
    found = keywords("T(a=1, **load(path))")
    assert found is not None
    assert found.of("a", None) == "1"
    assert found.of("b", None) == 'load(path)["b"]'
    assert found.of("c", "2") == 'load(path).get("c", 2)'
    rest = eval(found.rest(["b"]), {"load": lambda _: {"b": 1, "d": 4}, "path": None})  # noqa: S307
    assert rest == {"a": 1, "d": 4}


def test_of_two_unknown_dicts_nothing_is_known() -> None:
    assert keywords("T(**load(path), **other())") is None
