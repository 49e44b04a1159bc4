"""The text of a Python file with words written around its expressions, and lines before and behind its statements."""

from __future__ import annotations

import ast
import re
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

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """The loops of its function that a node is in, from within."""
        within = takewhile(lambda each: not isinstance(each, _SCOPES), self._outwards(node))
        return [each for each in within if isinstance(each, ast.For | ast.While)]

    def targets(self, loop: ast.For | ast.While, names: set[str]) -> list[str]:
        """Those of these names that each round of a loop gives a value."""
        nodes = ast.walk(loop.target) if isinstance(loop, ast.For) else ()
        return [each.id for each in nodes if isinstance(each, ast.Name) and each.id in names]

    def before_loops(self, node: ast.AST, name: str) -> ast.stmt:
        """The statement of a node, or the outermost loop in which the name gets nothing but what is computed of it."""
        names = {name, root_of(name)}
        loops = [each for each in self.loops(node) if not any([*self.values(each, one)] for one in names)]
        return [self.statement(node), *loops][-1]

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """The functions that a node is in, from within, and the module."""
        around = (each for each in self._outwards(node) if isinstance(each, _SCOPES))
        return [each for each in around if not isinstance(each, ast.ClassDef)]

    def stored(self, node: ast.AST) -> set[str]:
        """What gets a value there: names, attributes and entries."""
        return {
            ast.unparse(each) for each in ast.walk(node) if isinstance(getattr(each, "ctx", 0), ast.Store)
        }

    def values(self, scope: ast.AST, name: str) -> Iterator[ast.expr]:
        """What the name gets in a scope or loop without its inner scopes, itself aside; of a loop, what is gone through."""
        for each in (scope, *self._within(scope)):
            value = each.value if isinstance(each, ast.Assign | ast.AnnAssign) else None
            if value is not None and name in self.stored(each) and name not in loaded(value):
                yield value
            if isinstance(each, ast.For) and name in self.stored(each.target):
                yield each.iter

    def made_of(self, node: ast.AST, name: str, lengths: dict[str, set[int]]) -> list[str]:
        """Names in `lengths` that have one of the name's, and that its value is made of, from the start; or itself."""
        others = {each: found for each, found in lengths.items() if each != name and found & lengths[name]}
        values = [one for scope in self.scopes(node) for one in self.values(scope, name)]
        above = sorted({each for one in values for each in loaded(one) if each in others})
        return [one for each in above for one in self.made_of(node, each, others)] or [name]

    def readers(self, node: ast.AST) -> list[ast.stmt]:
        """The statement of a call, and those around it that read what it returns, or what is computed of that."""
        found = [self.statement(node)]
        names = self.stored(found[0])
        around = self._within([*self.loops(node), *self.scopes(node)][0])
        for each in (each for each in around if isinstance(each, ast.stmt) and not hasattr(each, "body")):
            if each is not found[0] and names & loaded(each):
                names |= self.stored(each)
                found.append(each)
        return found

    def wrap(self, node: ast.AST, function: str, words: str = "") -> None:
        """Write `ml.function(... words)` around an expression."""
        start, end = self._span(node)
        self.edits |= {(start, 1, start, f"{self.ml}.{function}("), (end, 0, end, f"{words})")}

    def replace(self, node: ast.AST, text: str) -> None:
        """Write `text` in place of an expression."""
        start, end = self._span(node)
        self.edits.add((start, 2, end, text))

    def write_keywords(self, call: ast.Call, texts: dict[str, str]) -> None:
        """Write arguments in place of those of these names; the first also where the call has none of its name."""
        found = {each.arg: each.value for each in call.keywords if each.arg in texts}
        for name, value in found.items():
            self.replace(value, texts[name or ""])
        if (name := next(iter(texts))) not in found:
            at = self.before.index(b"(", self._span(call.func)[1]) + 1
            self.edits.add((at, 2, at, f"{name}={texts[name]}{', ' * bool(call.keywords)}"))

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
        after = self.before
        for start, _, end, text in sorted(self.edits, reverse=True):
            after = after[:start] + text.encode() + after[end:]
        return self.before.decode(), after.decode()

    def _within(self, scope: ast.AST) -> Iterator[ast.AST]:
        for each in ast.iter_child_nodes(scope):
            yield each
            if not isinstance(each, _SCOPES):
                yield from self._within(each)

    def _outwards(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._above:
            node = self._above[node]
            yield node

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset


def root_of(name: str) -> str:
    """Of an attribute or an entry: the name that it begins with."""
    return re.split(r"[.\[]", name)[0]


def loaded(node: ast.AST) -> set[str]:
    """Names that are read there."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Load)}
