"""The statement of the user's code that asks for a value while a loss is read: where it only looks, the answer is known.

    if torch.isnan(loss):                 an `if` whose body raises, prints, warns or logs is passed by
        raise ValueError("NaN")
    assert bool((mask.sum(1) > 0).all())  an assertion holds

Eager runs these statements wherever a program is compared with it.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from functools import lru_cache
from types import CodeType
from typing import Any

_CALLED = {"print", "warn", "warning", "debug", "info", "error", "exception", "critical", "log", "breakpoint", "set_trace", "exit"}  # fmt: skip


def wanted_answer(depth: int = 1) -> bool | None:
    """The truth with which the statement that is asking, `depth` frames up, goes on as if it were not there; None: it decides
    what runs."""
    frame = sys._getframe(depth + 1)  # pyright: ignore[reportPrivateUsage]
    return _answer(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _answer(code: CodeType, offset: int) -> bool | None:
    """The answer at an instruction: the truth that its jump needs so as not to come to what the statement would do."""
    instructions = _instructions(code)
    at = next(
        (number for number, each in enumerate(instructions) if each.offset == offset), len(instructions)
    )
    jumps = [each for each in instructions[at : at + 2] if "JUMP" in each.opname and "IF_" in each.opname]
    where: Any = jumps[0].positions if jumps else None
    if where is None or where.lineno is None:
        return None
    truth = jumps[0].opname.endswith("TRUE")
    reached = next(number for number, each in enumerate(instructions) if each.offset == jumps[0].argval)
    target, behind = instructions[reached], instructions.index(jumps[0]) + 1
    to: Any = target.positions
    line: Any = to.lineno if to else None
    # at the end of a function, what returns None has the place of its last statement
    returns = (to.lineno, to.end_lineno, to.col_offset, to.end_col_offset) if to else None
    place = where.lineno, where.end_lineno, where.col_offset, where.end_col_offset
    for statement in _statements(code.co_filename):
        test = statement.test
        if place != _place(statement) and not test.lineno <= where.lineno <= (test.end_lineno or 0):
            continue
        if isinstance(statement, ast.Assert):
            return truth != (target.opname == "LOAD_ASSERTION_ERROR")
        first, last = statement.body[0].lineno, statement.body[-1].end_lineno or 0
        if line is not None and first <= line <= last:
            return not truth
        is_in_test = line is not None and test.lineno <= line <= (test.end_lineno or 0)
        if not is_in_test or returns == _place(statement) or _leaves(instructions, reached):
            return truth
        return not truth if _leaves(instructions, behind) else None
    return None


def _leaves(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether the statement is over at an instruction in its test's place: since Python 3.12 the end of a function or of a
    loop's body has the place of the last test in it."""
    names = [each.opname for each in instructions[at : at + 2]]
    return names[0] in ("RETURN_CONST", "JUMP_BACKWARD") or names == ["LOAD_CONST", "RETURN_VALUE"]


def _place(node: ast.stmt) -> tuple[int, int, int, int]:
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
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


@lru_cache(maxsize=256)
def _statements(file: str) -> list[ast.If | ast.Assert]:
    """Assertions, and `if`s that only look, of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Assert)
        or (isinstance(each, ast.If) and not each.orelse and all(map(_only_looks, each.body)))
    ]
