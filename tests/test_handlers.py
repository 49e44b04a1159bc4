"""Every kind of error is caught only where ranks start and end, at the capture, and at the command line; elsewhere such a handler
raises again, or hands the error on to who does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "meshloom"
ROOMS = ("launch", "cli", "program/capture")
ALL = {"Exception", "BaseException"}


def broad(file: Path) -> list[int]:
    """Lines of handlers of every error that do nothing with it but go on."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    handlers = [each for each in nodes if isinstance(each, ast.ExceptHandler)]
    of_all = [each for each in handlers if each.type is None or names(each.type) & ALL]
    silent = [
        each for each in of_all if not isinstance(each.body[-1], ast.Raise) and not hands_on(each, each.name)
    ]
    calls = [each for each in nodes if isinstance(each, ast.Call) and "suppress" in names(each.func)]
    silent += [each for each in calls if any(names(one) & ALL for one in each.args)]
    return [each.lineno for each in silent]


def names(node: ast.AST) -> set[str]:
    return {getattr(each, "id", "") or getattr(each, "attr", "") for each in ast.walk(node)}


def hands_on(node: ast.AST, error: str | None) -> bool:
    """Whether the error itself, not its text, is returned, kept, or given to a function: who waits for it raises it."""
    of_text = isinstance(node, ast.Call) and names(node.func) & {
        "str",
        "repr",
        "type",
        "print",
        "warn",
        "warning",
        "debug",
    }
    if isinstance(node, ast.JoinedStr) or of_text:
        return False
    if isinstance(node, ast.Attribute):  # what the error has, or a method of its
        return False
    is_it = isinstance(node, ast.Name) and node.id == error
    return is_it or any(hands_on(each, error) for each in ast.iter_child_nodes(node))


def files() -> Iterator[Path]:
    outside = tuple(f"{room}/" for room in ROOMS)
    for file in sorted(PACKAGE.rglob("*.py")):
        if not file.relative_to(PACKAGE).as_posix().startswith(outside):
            yield file


def test_no_other_handler_catches_every_error():
    found = [f"{file.relative_to(PACKAGE)}:{line}" for file in files() for line in broad(file)]
    assert found == []


BROAD = [
    "except Exception:\n  pass",
    "except:\n  pass",
    "except (ValueError, Exception) as error:\n  note(str(error))",
    "except BaseException as error:\n  return f'{error}'",
    "except Exception as error:\n  print(error)",
]
NARROW = [
    "except OSError:\n  pass",
    "except Exception as error:\n  undo()\n  raise ValueError from error",
    "except Exception as error:\n  return None, error",
    "except Exception as error:\n  future.set_exception(error)",
]


def test_what_counts_as_one(tmp_path: Path):
    file = tmp_path / "some.py"
    for handler in BROAD + NARROW:
        file.write_text(f"def f():\n try:\n  g()\n {handler}")
        assert bool(broad(file)) == (handler in BROAD), handler
    file.write_text("from contextlib import suppress\nwith suppress(Exception):\n g()")
    assert broad(file) == [2]
