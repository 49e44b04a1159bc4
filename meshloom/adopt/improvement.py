"""What a script makes of the numbers of its evaluation: which is best, when it stops, and what steps a scheduler."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.adopt.loop_pieces import names_of_loop
from meshloom.adopt.totals import OfMean, Scheduled, of_mean
from meshloom.adopt.watching.route import Line
from meshloom.adopt.watching.script import Script
from meshloom.adopt.watching.source import calls, method, used

Metrics = dict[str, str]  # text of an expression -> the metric that it is, or a growing function of it
PLACES = (ast.Name, ast.Attribute, ast.Subscript)


@dataclass
class Improvement:
    """best: as of `Evaluate`. patience: an expression. lines: statements that say so. names: of variables, by the metric that
    they came to be. curved: metrics of which the script takes a function that is no multiple, as a perplexity is of a loss.
    scheduled: as the pass ends, by the names in which metrics are added up."""

    best: str | None = None
    patience: str | None = None
    lines: list[Line] = field(default_factory=list[Line])
    names: dict[str, str] = field(default_factory=dict[str, str])
    curved: set[str] = field(default_factory=set[str])
    scheduled: list[Scheduled] = field(default_factory=list[Scheduled])


def improvement_of(evaluating: Script, totals: Mapping[str, str]) -> Improvement:
    """evaluating: the script at the end of a pass. totals: metric by the name in which it is added up."""
    found = Improvement()
    known: Metrics = dict(totals)
    values = {name: OfMean() for name in totals}
    frames = evaluating.watched.frames
    for frame in reversed(range(len(frames))):
        behind = [each for each in [*evaluating.route.beside, *evaluating.route.after] if each.frame == frame]
        results: Any = None
        made: Any = None
        for line in behind:
            _take(line.node, known, found)
            _compute(line.node, values)
            found.scheduled += _scheduled(evaluating, line, known, values)
            if isinstance(line.node, ast.Return) and line.node.value is not None and results is None:
                results = _results(line.node.value, partial(metric_of, known=known))
                made = _results(line.node.value, partial(of_mean, known=values))
                _note_curved(line.node.value, known, found)
        _judge(evaluating, behind, known, found)
        if frame:
            known, values = _received(evaluating, frame, results), _received(evaluating, frame, made)
            for text, metric in known.items():
                found.names.setdefault(text, metric)
    return found


def _take(node: ast.stmt, known: Metrics, found: Improvement) -> None:
    """`accuracy = 100 * correct / total`."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target = node.targets[0]
    values = [(target, node.value)]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        values = list(zip(target.elts, node.value.elts, strict=False))
    for place, value in values:
        metric = metric_of(value, known)
        _note_curved(value, known, found)
        if metric is not None and isinstance(place, PLACES):
            known[ast.unparse(place)] = metric
            found.names[ast.unparse(place)] = metric


def _compute(node: ast.stmt, values: dict[str, OfMean]) -> None:
    """`loss = total / count`, `loss /= count`."""
    if isinstance(node, ast.AugAssign):
        pairs: list[tuple[ast.expr, ast.expr]] = [(node.target, ast.BinOp(node.target, node.op, node.value))]
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
    else:
        return
    for text, made in [(ast.unparse(place), of_mean(value, values)) for place, value in pairs]:
        values.pop(text, None)
        if made is not None:
            values[text] = made


def _scheduled(
    evaluating: Script, line: Line, known: Metrics, values: Mapping[str, OfMean]
) -> Iterator[Scheduled]:
    """`scheduler.step(loss)` as often as there is an evaluation."""
    if line.depth != len(evaluating.route.loops) - 1:
        return
    if isinstance(line.node, ast.If) and used(line.node.test) & names_of_loop(evaluating):
        return
    for call in calls(line.node) if isinstance(line.node, ast.Expr | ast.If) else ():
        given = [*call.args, *(each.value for each in call.keywords if each.arg == "metrics")]
        if method(call) == "step" and given and isinstance(call.func, ast.Attribute):
            metric, scheduler = metric_of(given[0], known), evaluating.evaluate(call.func.value)
            if metric is not None and isinstance(scheduler, ReduceLROnPlateau):
                yield Scheduled(scheduler=scheduler, metric=metric, of=of_mean(given[0], values))


def _note_curved(node: ast.expr, known: Metrics, found: Improvement) -> None:
    for call in calls(node):
        metric = metric_of(call, known) if method(call) in ("exp", "log", "log10", "log2", "sqrt") else None
        if metric is not None:
            found.curved.add(metric)


def metric_of(node: ast.expr, known: Metrics) -> str | None:
    """The one metric that an expression grows with."""
    if any(isinstance(each, ast.Compare | ast.BoolOp | ast.USub | ast.Sub | ast.IfExp) for each in ast.walk(node)):  # fmt: skip
        return None
    metrics = {known[text] for each in ast.walk(node) if isinstance(each, PLACES) and (text := ast.unparse(each)) in known}  # fmt: skip
    below = [
        each.right for each in ast.walk(node) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div)
    ]
    if any(ast.unparse(each) in known for each in below):
        return None
    return metrics.pop() if len(metrics) == 1 else None


def _results(node: ast.expr, of: Callable[[ast.expr], Any]) -> Any:
    if isinstance(node, ast.Tuple):
        return [of(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            each.value: of(value)
            for each, value in zip(node.keys, node.values, strict=True)
            if isinstance(each, ast.Constant)
        }
    return of(node)


def _received(evaluating: Script, frame: int, results: Any) -> dict[str, Any]:
    """What the function that called `frame` calls its results."""
    statement = calling(evaluating, frame - 1)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return {}
    target, own = statement.targets[0], statement.value
    name = evaluating.watched.frames[frame].function
    if not isinstance(own, ast.Call) or method(own) != name:
        return {}
    if isinstance(results, dict) and isinstance(target, PLACES):
        text = ast.unparse(target)
        return {f"{text}[{key!r}]": metric for key, metric in results.items() if metric is not None}
    pairs: list[tuple[ast.expr, Any]] = [(target, results)]
    if isinstance(target, ast.Tuple):
        pairs = list(zip(target.elts, results, strict=False)) if isinstance(results, list) else []
    elif isinstance(results, list):
        text = ast.unparse(target)
        return {f"{text}[{index}]": metric for index, metric in enumerate(results) if metric is not None}
    return {ast.unparse(place): metric for place, metric in pairs if isinstance(metric, str | OfMean)}


def calling(evaluating: Script, frame: int) -> ast.stmt | None:
    """The statement of a frame that was running."""
    line = evaluating.watched.frames[frame].line
    found = [
        node
        for node in ast.walk(evaluating.route.sources[frame].tree)
        if isinstance(node, ast.Assign | ast.Expr | ast.Return | ast.AnnAssign)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(found, key=lambda node: node.lineno, default=None)


def _judge(evaluating: Script, behind: Sequence[Line], known: Metrics, found: Improvement) -> None:
    """Look for what is best, and for what counts evaluations without a better one."""
    for line in behind:
        for node in ast.walk(line.node):
            best = _compared(node, known) or _kept(node, known) or _called(evaluating, node, known)
            if best is not None:
                found.best = found.best or best[0]
                found.patience = found.patience or best[1]
                found.lines.append(line)
    counted = {
        node.target.id for line in behind for node in ast.walk(line.node)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name)
    }  # fmt: skip
    for line in behind if found.best else []:
        for node in ast.walk(line.node):
            if isinstance(node, ast.If) and any(_ends(each) for each in node.body):
                limit = _limit(line, node.test, counted)
                if limit is not None and found.patience is None:
                    found.patience = limit
                    found.lines.append(line)


def _compared(node: ast.AST, known: Metrics) -> tuple[str, str | None] | None:
    """`if loss < best: best = loss`, or `is_best = accuracy > best`."""
    if not isinstance(node, ast.If | ast.Assign):
        return None
    for test in _comparisons(node.test if isinstance(node, ast.If) else node.value):
        left, right = test.left, test.comparators[0]
        smaller = isinstance(test.ops[0], ast.Lt | ast.LtE)
        for value, other, least in ((left, right, smaller), (right, left, not smaller)):
            metric, place = metric_of(value, known), _place(other)
            if metric is None or place is None:
                continue
            assigned = [
                ast.unparse(each)
                for one in ast.walk(node)
                if isinstance(one, ast.Assign)
                for target in one.targets
                for each in ast.walk(target)
                if isinstance(each, PLACES)
            ]
            if isinstance(node, ast.Assign) or place in assigned:
                return f"{metric}:{'min' if least else 'max'}", None
    return None


def _comparisons(test: ast.expr) -> Iterator[ast.Compare]:
    tests = test.values if isinstance(test, ast.BoolOp) else [test]
    for each in tests:
        if (
            isinstance(each, ast.Compare)
            and len(each.ops) == 1
            and isinstance(each.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        ):
            yield each


def _place(node: ast.expr) -> str | None:
    """`best` of `best - delta`."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return ast.unparse(node) if isinstance(node, PLACES) else None


def _kept(node: ast.AST, known: Metrics) -> tuple[str, str | None] | None:
    """`best = max(best, accuracy)`."""
    if (
        not isinstance(node, ast.Assign)
        or not isinstance(node.value, ast.Call)
        or method(node.value) not in ("max", "min")
        or len(node.value.args) != 2
    ):
        return None
    targets = {ast.unparse(each) for each in node.targets}
    for value, other in (node.value.args, reversed(node.value.args)):
        metric = metric_of(value, known)
        if metric is not None and ast.unparse(other) in targets:
            return f"{metric}:{method(node.value)}", None
    return None


def _called(evaluating: Script, node: ast.AST, known: Metrics) -> tuple[str, str | None] | None:
    """`early_stopping(loss, model)` of an object with a `patience`."""
    for call in calls(node) if isinstance(node, ast.Expr | ast.If | ast.Assign) else ():
        stopper = evaluating.evaluate(call.func)
        if stopper is None and isinstance(call.func, ast.Attribute):
            stopper = evaluating.evaluate(call.func.value)
        patience = getattr(stopper, "patience", None)
        metric = metric_of(call.args[0], known) if call.args else None
        if type(patience) is int and metric is not None:
            largest = getattr(stopper, "mode", "min") == "max"
            return f"{metric}:{'max' if largest else 'min'}", str(patience)
    return None


def _ends(node: ast.stmt) -> bool:
    """Whether a statement leaves the loop."""
    return isinstance(node, ast.Break | ast.Return) or (
        isinstance(node, ast.Expr) and any(method(each) == "exit" for each in calls(node))
    )


def _limit(line: Line, test: ast.expr, counted: set[str]) -> str | None:
    for each in _comparisons(test):
        if isinstance(each.left, ast.Name) and each.left.id in counted and isinstance(each.ops[0], ast.GtE | ast.Gt):  # fmt: skip
            text = line.source.segment(each.comparators[0])
            return text if isinstance(each.ops[0], ast.GtE) else f"{text} + 1"
    return None
