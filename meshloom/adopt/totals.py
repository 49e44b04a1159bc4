"""What a pass over held-out data adds up, and what that is divided by behind it."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshloom.adopt.watching.passes import SeenPass
from meshloom.adopt.watching.route import Line
from meshloom.adopt.watching.script import Script
from meshloom.adopt.watching.source import method


@dataclass(frozen=True, kw_only=True)
class Total:
    """What a pass adds up. name: in its frame. expression: added for a batch. over: "samples", "batches", or the name of the
    total that it is divided by. weight: of a batch, where a meter is told it. at: the place among the statements. mean: what
    the script's pass came to."""

    name: str
    expression: ast.expr
    over: str
    weight: ast.expr | None
    at: int
    mean: float


@dataclass(frozen=True, kw_only=True)
class OfMean:
    """A number that a script makes of a total. text: as an expression of `value`. divided: whether that is the total's mean, rather
    than the total. names: that the text uses."""

    text: str = "value"
    divided: bool = False
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A scheduler that is stepped with a metric after each evaluation. of: what of the metric; None: not known, it grows with it."""

    scheduler: Any
    metric: str
    of: OfMean | None


def of_mean(node: ast.expr, known: Mapping[str, OfMean]) -> OfMean | None:
    """known: by the text of expressions.

    >>> known = {"total": OfMean()}
    >>> of_mean(ast.parse("math.exp(total / len(data))", mode="eval").body, known)
    OfMean(text='math.exp(value)', divided=True, names=frozenset({'math'}))
    >>> of_mean(ast.parse("100.0 * total / count", mode="eval").body, known).text
    '100.0 * value'
    """
    if (text := ast.unparse(node)) in known:
        return known[text]
    if isinstance(node, ast.Attribute):
        inner = of_mean(node.value, known) if node.attr in ("avg", "average", "mean") else None
        return replace(inner, divided=True) if inner and not inner.divided else None
    if isinstance(node, ast.Call):
        return _of_call(node, known)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Div):
        return None
    left, right = node.left, node.right
    if isinstance(node.op, ast.Mult) and _is_number(left):
        inner = of_mean(right, known)
        return replace(inner, text=f"{ast.unparse(left)} * {_factor(inner)}") if inner else None
    inner = of_mean(left, known)
    if inner and _is_number(right):
        sign = "*" if isinstance(node.op, ast.Mult) else "/"
        return replace(inner, text=f"{_factor(inner)} {sign} {ast.unparse(right)}")
    return replace(inner, divided=True) if inner and not inner.divided and isinstance(node.op, ast.Div) else None  # fmt: skip


def _of_call(node: ast.Call, known: Mapping[str, OfMean]) -> OfMean | None:
    """`float(mean)`, `mean.item()`, `sum(losses)`, `np.mean(losses)`, `math.exp(mean)`."""
    name, of = method(node), node.func
    if name == "item" and isinstance(of, ast.Attribute) and not node.args:
        return of_mean(of.value, known)
    inner = of_mean(node.args[0], known) if len(node.args) == 1 and not node.keywords else None
    if inner is None or name in ("float", "sum"):
        return inner if isinstance(of, ast.Name) else None
    if not isinstance(of, ast.Attribute) or not isinstance(of.value, ast.Name):
        return None
    if name == "mean":
        return None if inner.divided else replace(inner, divided=True)
    if name == "exp" and inner.divided and of.value.id in ("math", "np", "numpy"):
        return replace(inner, text=f"{ast.unparse(of)}({inner.text})", names=inner.names | {of.value.id})
    return None


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _factor(inner: OfMean) -> str:
    return f"({inner.text})" if "/" in inner.text or " " in inner.text else inner.text


def totals_of_pass(evaluating: Script, seen: SeenPass, statements: Sequence[ast.stmt]) -> list[Total]:
    """evaluating: the script at the end of the pass. statements: of a batch. What is added to in two places is none."""
    added = [
        (name, expression, weight, at, kind)
        for at, node in enumerate(statements)
        for name, expression, weight, kind in additions(node)
        if name in seen.totals
    ]
    names = [each[0] for each in added]
    found: list[Total] = []
    for name, expression, weight, at, kind in added:
        if names.count(name) > 1:
            continue
        value, number = seen.totals[name]
        if kind == "update":
            over = "samples" if weight is not None else "batches"
        elif kind == "append":
            over = "batches"
        else:
            over = _divisor(evaluating, seen, name, set(names) - {name})
            sizes = {"samples": len(seen.loader.sampler), "batches": len(seen.loader)}
            number = sizes[over] if over in sizes else seen.totals[over][0]
        mean = value / number if number else math.nan
        found.append(Total(name=name, expression=expression, over=over, weight=weight, at=at, mean=mean))
    return found


def _divisor(evaluating: Script, seen: SeenPass, name: str, others: set[str]) -> str:
    """What a total is divided by behind the loop."""
    for line in _behind(evaluating):
        for node in ast.walk(line.node):
            divided = node.left if isinstance(node, ast.BinOp) else node.target if isinstance(node, ast.AugAssign) else None  # fmt: skip
            if divided is None or root_of(divided) != name:
                continue
            assert isinstance(node, ast.BinOp | ast.AugAssign)
            divisor = node.right if isinstance(node, ast.BinOp) else node.value
            if not isinstance(node.op, ast.Div):
                continue
            other = root_of(divisor)
            if other in others:
                return str(other)
            size = _size(evaluating, divisor)
            if size == len(seen.loader.sampler):
                return "samples"
            if size == len(seen.loader):
                return "batches"
    return "samples"


def _size(evaluating: Script, node: ast.expr) -> int | None:
    """The value of `len(loader.dataset)`, or of a name."""
    if isinstance(node, ast.Call) and method(node) == "len" and node.args:
        counted: Any = evaluating.evaluate(node.args[0])
        return len(counted) if hasattr(counted, "__len__") else None
    value: Any = evaluating.evaluate(node)
    return value if type(value) is int else None


def _behind(evaluating: Script) -> list[Line]:
    """Statements behind the loop, those of its own function first."""
    route = evaluating.route
    return sorted([*route.beside, *route.after], key=lambda each: -each.frame)


def additions(node: ast.stmt) -> Iterator[tuple[str, ast.expr, ast.expr | None, str]]:
    """What a statement adds to which name, with which weight, and how."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value, None, "+="
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
        and isinstance(node.value.left, ast.Name)
        and [ast.unparse(each) for each in node.targets] == [node.value.left.id]
    ):
        yield node.value.left.id, node.value.right, None, "+="
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        call = node.value
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            if call.func.attr == "append":
                yield call.func.value.id, call.args[0], None, "append"
            elif call.func.attr == "update":
                given = [*call.args[1:], *(each.value for each in call.keywords)]
                yield call.func.value.id, call.args[0], given[0] if given else None, "update"


def root_of(node: ast.expr) -> str | None:
    """`total` of `100.0 * total`, `float(total)`, `total.item()`."""
    while True:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            node = node.right if isinstance(node.left, ast.Constant) else node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            node = node.func.value
        elif isinstance(node, ast.Call) and method(node) in ("float", "int", "max") and node.args:
            node = node.args[0]
        else:
            return node.id if isinstance(node, ast.Name) else None
