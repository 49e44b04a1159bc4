"""What docs/architecture.md names of the steps that it follows is in the files that it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_0-9/]+\.py)` `([\w.]+)`", TEXT)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_is_named_is_in_its_file(file: str, name: str):
    inside: ast.AST = ast.parse((ROOT / "meshloom" / file).read_text(encoding="utf-8"))
    for word in name.split("."):
        found = [
            each
            for each in ast.iter_child_nodes(inside)
            if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == word
        ]
        assert found, f"docs/architecture.md names {name}, and {file} has no {word} there"
        inside = found[0]
