"""A Python file as statements with their text, and what each of them uses, binds and changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # fmt: skip
Replacement = tuple[ast.AST, str]  # a node, and the text in its place


@dataclass(frozen=True)
class PythonSource:
    """A file and its text."""

    path: Path
    text: str

    @staticmethod
    def read(path: Path) -> PythonSource:
        return PythonSource(path, path.read_text(encoding="utf-8"))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def singles(self) -> dict[int, list[tuple[PythonSource, ast.stmt]]]:
        """Of statements by id, the single ones that they stand for."""
        return {}

    @cached_property
    def flattened(self) -> dict[str, str]:
        """Plain names of the attributes of an object whose class is in the file, where they stand in place of these."""
        return {}

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def _bytes(self) -> bytes:
        return self.text.encode()

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def segment(self, node: ast.AST, replacements: Sequence[Replacement] = ()) -> str:
        """The text of a node, with other text in place of some nodes within it."""
        return self._between(*self._range(node), replacements)

    def replaced(self, replacements: Sequence[Replacement]) -> str:
        """The whole text, with other text in place of some nodes."""
        return self._between(0, len(self._bytes), replacements)

    def _between(self, start: int, stop: int, replacements: Sequence[Replacement]) -> str:
        text, at = b"", start
        for inner, new in sorted(replacements, key=lambda each: self._range(each[0])):
            first, last = self._range(inner)
            if first >= at:  # not within one that was replaced
                text += self._bytes[at:first] + new.encode()
                at = last
        return (text + self._bytes[at:stop]).decode()

    def statement(self, node: ast.stmt, replacements: Sequence[Replacement] = ()) -> str:
        """The text of a statement without its indentation, with the comments above and behind it."""
        text = self.segment(node, replacements)
        assert node.end_lineno is not None
        decorated = self._first_line(node)
        indent = self.lines[decorated - 1][: node.col_offset]
        if decorated < node.lineno:
            text = "\n".join([*self.lines[decorated - 1 : node.lineno - 1], indent + text]).lstrip()
        behind = self._bytes[self._range(node)[1] : self._line_starts[node.end_lineno]].decode().rstrip()
        if behind.lstrip().startswith("#"):
            text += behind
        lines = text.split("\n")
        text = "\n".join([lines[0], *(each.removeprefix(indent) for each in lines[1:])])
        return "\n".join([*self._comments_above(decorated, indent), text])

    def span(self, node: ast.stmt) -> tuple[int, int]:
        """The first and the last line of a statement, with its decorators and the comments above it."""
        first = self._first_line(node)
        indent = self.lines[first - 1][: node.col_offset]
        assert node.end_lineno is not None
        return first - len(self._comments_above(first, indent)), node.end_lineno

    def function(self, name: str, line: int) -> ast.FunctionDef | None:
        """The function of this name whose lines contain `line`, the innermost."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef)
            and node.name == name
            and node.lineno <= line <= (node.end_lineno or 0)
        ]
        return max(found, key=lambda node: node.lineno, default=None)

    def _first_line(self, node: ast.stmt) -> int:
        return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])

    def _comments_above(self, line: int, indent: str) -> list[str]:
        found: list[str] = []
        while line > 1 and self.lines[line - 2].startswith(f"{indent}#"):
            line -= 1
            found.insert(0, self.lines[line - 1].removeprefix(indent))
        return found

    def _range(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._line_starts[node.lineno - 1] + node.col_offset,
            self._line_starts[node.end_lineno - 1] + node.end_col_offset,
        )


def used(node: ast.AST) -> set[str]:
    """Names that are read in it before it binds them, those of nested functions too, without their own.

    >>> sorted(used(ast.parse("y = f(x, [i for i in z])")))
    ['f', 'x', 'z']
    >>> sorted(used(ast.parse("with a as b: c = b; d = c")))
    ['a']
    """
    if isinstance(node, ast.Module | ast.With | ast.For | ast.If | ast.While):
        header = [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.stmt)]
        names = set[str]().union(*map(used, header))
        own = bound(node.target) if isinstance(node, ast.For) else set[str]()
        own |= {name for each in header if isinstance(each, ast.withitem) for name in bound(each)}
        for each in [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]:
            names |= used(each) - own
            own |= bound(each)
        return names
    names: set[str] = set()
    own: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load | ast.Del):
            names.add(each.id)
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        if isinstance(each, ast.comprehension):
            own |= {name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)}
        if isinstance(each, ast.FunctionDef | ast.Lambda):
            arguments = each.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            own |= {one.arg for one in [*given, arguments.vararg, arguments.kwarg] if one}
            if isinstance(each, ast.FunctionDef):
                own |= set().union(*(bound(inner) for inner in each.body))
    return names - own


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a text, or another constant, alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def bound(node: ast.AST) -> set[str]:
    """Names that a statement binds in its scope.

    >>> sorted(bound(ast.parse("import a.b; c, d = 1, 2; e.f = [g for g in h]").body[0]))
    ['a']
    """
    names: set[str] = set()
    for each in _of_scope(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
    return names


def changed(node: ast.stmt) -> set[str]:
    """Names of objects that a statement may change in place: those whose attributes or items it sets, whose methods it
    calls for their effect, and those that it hands to a function whose result it drops.

    >>> sorted(changed(ast.parse("a.b = 1; c.append(d); f(e, g.h)").body[0]))
    ['a']
    """
    names: set[str] = set()
    for each in _of_scope(node):
        if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store | ast.Del):
            names |= roots(each)
        elif isinstance(each, ast.AugAssign):
            names |= roots(each.target)
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            call = each.value
            if isinstance(call.func, ast.Attribute):
                names |= roots(call.func)
            names |= {one.id for one in call.args if isinstance(one, ast.Name)}
            names |= {one.value.id for one in call.keywords if isinstance(one.value, ast.Name)}
        elif isinstance(each, ast.For):  # `for p in model.parameters(): p.requires_grad = False`
            targets = {name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)}
            if any(targets & changed(inner) for inner in each.body):
                names |= used(each.iter)
    return names


def roots(node: ast.AST) -> set[str]:
    """The name at the beginning of `a.b[c].d().e`: a."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """All calls within."""
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def method(call: ast.Call) -> str:
    """The last name of what is called: `step` of `optimizer.step()`, `print` of `print()`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """`a.b.c`, or "" of anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _of_scope(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, SCOPES):
        return
    for each in ast.iter_child_nodes(node):
        yield from _of_scope(each)
