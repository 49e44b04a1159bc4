"""Statements of a script's set-up as the single ones that they stand for.

criterion, optimizer = A(), B(p)      criterion = A()
                                      optimizer = B(p)
net, opt = build(cfg)                 what build does, with net and opt as the names of what it returns
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshloom.adopt.watching.keywords import keywords_of
from meshloom.adopt.watching.passes import SeenFrame
from meshloom.adopt.watching.source import PythonSource, Replacement, bound, is_docstring, used

Part = tuple[PythonSource, ast.stmt]  # a statement in a text of its own, at its line


def split_tuple(source: PythonSource, node: ast.stmt) -> list[Part]:
    """`a, b = x, y` as `a = x` and `b = y`, where y does not read a; nothing of other statements."""
    pairs = _pairs(node)
    if pairs is None:
        return []
    texts = [
        f"{name} = {_in_one(source.segment(value))}" for name, value in pairs if name != ast.unparse(value)
    ]
    return [part(source, node, text) for text in texts or ["pass"]]


def inline_call(source: PythonSource, node: ast.stmt, frame: SeenFrame) -> list[Part]:
    """The statements of a function of the file whose call returns the model or the optimizer with something else; nothing of other
    statements, and of functions that return in several places. frame: where the statement is; its values gain those of the
    function's names."""
    targets = _targets(node)
    if len(targets) < 2 or not any(
        isinstance(frame.values.get(each), nn.Module | Optimizer | LRScheduler) for each in targets
    ):
        return []
    assert isinstance(node, ast.Assign)
    found = _function_of(source, node.value, frame)
    if found is None:
        return []
    call, function, code = found
    body = _body_of(function)
    if not body or not isinstance(end := body[-1], ast.Return) or not _returns_once(function, end):
        return []
    returned = end.value.elts if isinstance(end.value, ast.Tuple) else []
    given = dict(arguments_of(source, call, source, function, frame.globals | frame.values) or [])
    if len(returned) != len(targets) or not {each.arg for each in function.args.args} <= set(given):
        return []
    names = _names_in(function, body[:-1], given, frame)
    for target, value in zip(targets, returned, strict=True):
        if isinstance(value, ast.Name) and value.id in names and value.id not in _read_only(body[:-1], given):
            names[value.id] = target
    if not can_rename(body, names) or _captured(function, frame):
        return []
    frame.values.update({names[name]: each for name, each in frame.made.get(code, {}).items() if name in names and names[name] not in frame.values})  # fmt: skip
    parts = [
        part(source, node, f"{names[name]} = {text}") for name, text in given.items() if names[name] != text
    ]
    parts += [part(source, each, source.statement(each, renamed(source, each, names))) for each in body[:-1]]
    for target, value in zip(targets, returned, strict=True):
        text = source.segment(value, renamed(source, value, names))
        if text != target:
            parts.append(part(source, end, f"{target} = {_in_one(text)}"))
    return parts


def part(source: PythonSource, node: ast.stmt, text: str) -> Part:
    """A statement of this text at the line of `node`. The comments that it begins with stand above that line."""
    above = next(index for index, each in enumerate(text.split("\n")) if not each.startswith("#"))
    own = PythonSource(source.path, "\n" * max(0, node.lineno - 1 - above) + text)
    return own, own.tree.body[0]


def renamed(source: PythonSource, node: ast.AST, names: Mapping[str, str]) -> list[Replacement]:
    """Replacements of the names within it."""

    class Renaming(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Name(names.get(node.id, node.id), node.ctx)

    return replacements(
        node, lambda each: names.get(each.id) if isinstance(each, ast.Name) else None, Renaming()
    )


def replacements(node: ast.AST, new: Any, transformer: ast.NodeTransformer) -> list[Replacement]:
    """Of the nodes within it for which `new` has a text. Formatted strings, whose inner nodes have no places in Python 3.11, are
    written anew by the transformer."""
    if isinstance(node, ast.JoinedStr):
        changes = any(new(each) for each in ast.walk(node)) and node.lineno == node.end_lineno
        return [(node, ast.unparse(transformer.visit(copy.deepcopy(node))))] if changes else []
    if text := new(node):
        return [(node, text)]
    return [one for each in ast.iter_child_nodes(node) for one in replacements(each, new, transformer)]


def arguments_of(
    source: PythonSource,
    call: ast.Call,
    into: PythonSource,
    function: ast.FunctionDef,
    values: Mapping[str, Any],
) -> list[tuple[str, str]] | None:
    """Parameters with the text that they are given, or their default's; None where either has *arguments or the call
    **arguments whose keys are not known. A method's first parameter is left out. values: of the names where the call is."""
    arguments = function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    names = names[1:] if names[:1] == ["self"] else names
    keywords = keywords_of(source, call, values)
    if arguments.vararg or keywords is None or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    given = {name: source.segment(each) for name, each in zip(names, call.args, strict=False)}
    defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    defaults |= {each.arg: default for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default}  # fmt: skip
    order = [*names, *(each.arg for each in arguments.kwonlyargs)]
    texts = {name: into.segment(default) for name, default in defaults.items()}
    found = {name: given[name] if name in given else keywords.of(name, texts.get(name)) for name in order}
    if arguments.kwarg is not None:
        found[arguments.kwarg.arg] = keywords.rest(order)
    return [(name, text) for name, text in found.items() if text is not None]


def can_rename(body: Sequence[ast.stmt], names: Mapping[str, str]) -> bool:
    """Whether no name that changes is bound by more than plain names: nested functions, their parameters, imports."""
    new = {name for name, each in names.items() if each != name}
    for node in (inner for each in body for inner in ast.walk(each)):
        if isinstance(node, ast.arg) and node.arg in new:
            return False
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
            and bound(node) & new
        ):
            return False
    return True


def _pairs(node: ast.stmt) -> list[tuple[str, ast.expr]] | None:
    targets = _targets(node)
    if (
        not isinstance(node, ast.Assign)
        or not isinstance(node.value, ast.Tuple)
        or len(node.value.elts) != len(targets)
    ):
        return None
    pairs = list(zip(targets, node.value.elts, strict=True))
    for index, (_, value) in enumerate(pairs):
        if isinstance(value, ast.Starred) or used(value) & set(targets[:index]) - _unchanged(pairs):
            return None
    return pairs


def _unchanged(pairs: Sequence[tuple[str, ast.expr]]) -> set[str]:
    return {name for name, value in pairs if isinstance(value, ast.Name) and value.id == name}


def _targets(node: ast.stmt) -> list[str]:
    """The names of `a, b = ...`; none of other statements."""
    if (
        not isinstance(node, ast.Assign)
        or len(node.targets) != 1
        or not isinstance(node.targets[0], ast.Tuple)
    ):
        return []
    found = [each.id for each in node.targets[0].elts if isinstance(each, ast.Name)]
    return found if len(found) == len(node.targets[0].elts) else []


def _in_one(text: str) -> str:
    """An expression that can stand behind `=`."""
    try:
        ast.parse(f"_ = {text}")
    except SyntaxError:
        return f"({text})"
    return text


def _function_of(
    source: PythonSource, value: ast.expr, frame: SeenFrame
) -> tuple[ast.Call, ast.FunctionDef, types.CodeType] | None:
    """The function of this file that is called, without decorators."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    called = (frame.globals | frame.values).get(value.func.id)
    if not isinstance(called, types.FunctionType) or called.__closure__:
        return None
    function = source.function(called.__name__, called.__code__.co_firstlineno)
    same = function is not None and function.lineno == called.__code__.co_firstlineno
    if function is None or not same or function.decorator_list or called.__globals__ is not frame.globals:
        return None
    return value, function, called.__code__


def _body_of(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[1:] if is_docstring(function.body[0]) else function.body


def _returns_once(function: ast.FunctionDef, end: ast.Return) -> bool:
    inner = {id(one) for each in ast.walk(function) if isinstance(each, ast.FunctionDef | ast.Lambda) and each is not function for one in ast.walk(each)}  # fmt: skip
    leaving = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)
    return all(each is end or id(each) in inner for each in ast.walk(function) if isinstance(each, leaving))


def _read_only(body: Sequence[ast.stmt], given: Collection[str]) -> set[str]:
    """Parameters that the body does not bind."""
    return set(given) - set[str]().union(*(bound(each) for each in body))


def _names_in(
    function: ast.FunctionDef, body: Sequence[ast.stmt], given: Mapping[str, str], frame: SeenFrame
) -> dict[str, str]:
    """The names that a function's own have where it is called: those of its arguments, their own, or prefixed ones if these are
    another thing there."""
    own = set(given).union(*(bound(each) for each in body))
    taken = set(frame.values) | set(frame.globals)
    names = {name: f"{function.name}_{name}" if name in taken else name for name in sorted(own)}
    return names | {name: given[name] for name in _read_only(body, given) if given[name].isidentifier()}


def _captured(function: ast.FunctionDef, frame: SeenFrame) -> bool:
    """Whether a global name that it reads is another thing where it is called."""
    free = used(ast.Module(list(function.body), [])) - {each.arg for each in function.args.args}
    return any(
        name in frame.values and name in frame.globals and frame.values[name] is not frame.globals[name]
        for name in free
    )


def single_statements(source: PythonSource, node: ast.stmt, frame: SeenFrame) -> Iterator[Part]:
    """The parts of a statement, each of them taken apart too; nothing if it stays as it is."""
    for inner, each in split_tuple(source, node) or inline_call(source, node, frame):
        again = list(split_tuple(inner, each))
        yield from again or [(inner, each)]
