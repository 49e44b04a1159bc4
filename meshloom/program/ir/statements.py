"""The statement of the user's code that asks for a value while a loss is read: where it only looks, the answer is known.

    if torch.isnan(loss):                 an `if` whose body raises, prints, warns or logs is passed by
        raise ValueError("NaN")
    assert bool((mask.sum(1) > 0).all())  an assertion holds

The comparison with eager, and eager itself where it is compared, run these statements.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

_CALLED = {"print", "warn", "warning", "debug", "info", "error", "exception", "critical", "log", "breakpoint", "set_trace", "exit"}  # fmt: skip


def wanted_answer(depth: int = 1) -> bool | None:
    """The truth with which the statement that is asking, `depth` frames up, goes on as if it were not there; None: it decides
    what runs."""
    frame = sys._getframe(depth + 1)  # pyright: ignore[reportPrivateUsage]
    place = _position(frame)
    return None if place is None else _answer(frame.f_code.co_filename, place)


def _position(frame: FrameType) -> tuple[int, int, int, int] | None:
    """First and last line, and columns, of the expression whose truth is asked for."""
    found = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    return None if found is None or None in found else found  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=4096)
def _answer(file: str, place: tuple[int, int, int, int]) -> bool | None:
    for statement in _statements(file):
        if isinstance(statement, ast.Assert):
            test, wanted = statement.test, True
        elif isinstance(statement, ast.If) and not statement.orelse and all(map(_only_looks, statement.body)):
            test, wanted = statement.test, False
        else:
            continue
        parts = list(_parts(test, wanted))
        here = [truth for part, truth in parts if _place(part) == place]
        # a jump has the place of its statement, unless it follows a comparison
        here = here or [truth for _, truth in parts if _place(statement) == place]
        if here:
            return here[0] if len(set(here)) == 1 else None
    return None


def _parts(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The expressions whose truth a test asks for, and what they must be for it to be `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for each in test.values:
            yield from _parts(each, wanted)
    else:
        if (
            isinstance(test, ast.Call)
            and isinstance(test.func, ast.Name)
            and test.func.id == "bool"
            and test.args
        ):
            yield from _parts(test.args[0], wanted)
        yield test, wanted


def _place(node: ast.expr | ast.stmt) -> tuple[int, int, int, int]:
    return node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0


def _only_looks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise | ast.Pass | ast.Assert | ast.Import):
        return True
    called = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(called, ast.Constant):
        return True
    function: Any = called.func if isinstance(called, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", None)) in _CALLED


@lru_cache(maxsize=256)
def _statements(file: str) -> list[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [each for each in ast.walk(tree) if isinstance(each, ast.If | ast.Assert)]
