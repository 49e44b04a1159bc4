"""The text of a Python file with words written around its expressions, and lines before and behind its statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from meshloom.adopt.watched_loop import Place

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)


class SourceLines:
    """The file `path`, which is not changed. ml: the name of meshloom in it."""

    def __init__(self, path: Path) -> None:
        self.before = path.read_bytes()
        self.tree = ast.parse(self.before)
        self.nodes = list(ast.walk(self.tree))
        self._above = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._starts = [0, *accumulate(map(len, self.before.splitlines(keepends=True)))]
        taken = {getattr(each, name, None) for each in self.nodes for name in ("id", "name", "asname")}
        self.ml = "meshloom" if "ml" in taken else "ml"
        self.edits: set[tuple[int, int, int, str]] = set()  # from, order, to, what is there then

    def call_at(self, place: Place) -> Any:
        """The call that ends there, or the comprehension, which is run as one."""
        calls = (each for each in self.nodes if isinstance(each, ast.Call | ast.ListComp | ast.DictComp))
        return next((each for each in calls if (each.end_lineno, each.end_col_offset) == place[1:]), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that a node is, or is in."""
        return next(each for each in (node, *self._outwards(node)) if isinstance(each, ast.stmt))

    def loops(self, node: ast.AST) -> list[ast.stmt]:
        """The loops of its function that a node is in, from within."""
        within = takewhile(lambda each: not isinstance(each, _SCOPES), self._outwards(node))
        return [each for each in within if isinstance(each, ast.For | ast.While)]

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """The functions that a node is in, from within, and the module."""
        around = (each for each in self._outwards(node) if isinstance(each, _SCOPES))
        return [each for each in around if not isinstance(each, ast.ClassDef)]

    def stored(self, node: ast.AST) -> set[str]:
        """What gets a value there: names, attributes and entries."""
        return {self.text(each) for each in ast.walk(node) if isinstance(getattr(each, "ctx", 0), ast.Store)}

    def values(self, scope: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
        """What the name gets in a scope without its inner ones, itself aside: an expression, and ""; of a loop, the first statement of its body, and
        the names that go through it."""
        for each in self._within(scope):
            if isinstance(each, ast.Assign) and name in self.stored(each) and name not in _loaded(each.value):
                yield each.value, ""
            if isinstance(each, ast.For) and name in self.stored(each.target):
                yield each.body[0], self.text(each.target)

    def readers(self, call: ast.Call) -> list[ast.AST]:
        """The statement of a call, and those around it that read what it returns, or what is computed of that."""
        found = list[ast.AST]([self.statement(call)])
        names = self.stored(found[0])
        around = self._within([*self.loops(call), *self.scopes(call)][0])
        for each in (each for each in around if isinstance(each, ast.stmt) and not hasattr(each, "body")):
            if each is not found[0] and names & _loaded(each):
                names |= self.stored(each)
                found.append(each)
        return found

    def text(self, node: ast.AST) -> str:
        """Its source."""
        return self.before[slice(*self._span(node))].decode()

    def wrap(self, node: ast.AST, function: str) -> None:
        """Write `ml.function(...)` around an expression."""
        start, end = self._span(node)
        first = node.elts[0] if isinstance(node, ast.Tuple) else None
        bare = first is not None and self._span(first)[0] == start
        self.edits.add((start, 1, start, f"{self.ml}.{function}({'(' * bare}"))
        self.edits.add((end, 0, end, ")" * (1 + bare)))

    def replace(self, node: ast.AST, text: str) -> None:
        """Write `text` in place of an expression."""
        start, end = self._span(node)
        self.edits.add((start, 2, end, text))

    def write_line(self, node: ast.AST, text: str, *, after: bool = False) -> None:
        """Write a statement before another, or behind it and what else is in its line."""
        start, end = self._span(node)
        line = self.before[:start].rpartition(b"\n")[2].decode()
        end += 0 if line.strip() else len(self.before[end:].partition(b"\n")[0].rstrip())
        between = "; " if line.strip() else f"\n{line}"
        self.edits.add((end, 2, end, f"{between}{text}") if after else (start, 0, start, f"{text}{between}"))

    def write_import(self) -> None:
        """Write the import of meshloom before the first other one, or else the first statement."""
        body = [each for each in self.tree.body if getattr(each, "module", None) != "__future__"]
        imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        self.write_line([*imports, *body][0], "import meshloom" + (" as ml" if self.ml == "ml" else ""))

    def texts(self) -> tuple[str, str]:
        """The file as it is, and with what was written."""
        parts, at = list[bytes](), 0
        for start, _, end, text in sorted(self.edits):
            parts += [self.before[at:start], text.encode()]
            at = end
        return self.before.decode(), b"".join([*parts, self.before[at:]]).decode()

    def _within(self, scope: ast.AST) -> Iterator[ast.AST]:
        for each in ast.iter_child_nodes(scope):
            yield each
            if not isinstance(each, _SCOPES):
                yield from self._within(each)

    def _outwards(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._above:
            node = self._above[node]
            yield node

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset


def _loaded(node: ast.AST) -> set[str]:
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Load)}
