"""Where the code stands that docs/architecture.md follows: `python -m tests.followed` puts today's line
numbers into it.

A reference reads `exchange/all_reduce.py:41` `AllReduce.finish`: a file of the package, a line, and what
begins there.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
REFERENCE = re.compile(r"`(?P<file>[a-z_0-9/]+\.py):(?P<line>\d+)` `(?P<name>[\w.]+)`")


@cache
def lines_of(file: str) -> dict[str, int]:
    """Functions, classes and methods of a file of the package -> the line on which they begin, without
    decorators."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, before: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[before + child.name] = child.lineno
                visit(child, f"{before}{child.name}.")

    visit(ast.parse((ROOT / "meshloom" / file).read_text(encoding="utf-8")), "")
    return found


def corrected(text: str) -> str:
    """The text with the line numbers of today. Raises `KeyError` for what is not in its file any more."""
    return REFERENCE.sub(
        lambda found: f"`{found['file']}:{lines_of(found['file'])[found['name']]}` `{found['name']}`", text
    )


if __name__ == "__main__":
    DOCUMENT.write_text(corrected(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
