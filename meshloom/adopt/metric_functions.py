"""What a pass adds up of a batch, as the function of a metric."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from meshloom.adopt.counters import bound_by
from meshloom.adopt.loop_pieces import free_names, names_of_loop, unpacking
from meshloom.adopt.setup_pieces import JobFunction, function_text, is_nothing, moves
from meshloom.adopt.totals import Total, additions, totals_of_pass
from meshloom.adopt.watching.passes import SeenPass
from meshloom.adopt.watching.route import Loop, UntranslatedError
from meshloom.adopt.watching.script import Script, is_talk
from meshloom.adopt.watching.source import PythonSource, Replacement, bound, calls, changed, method, used


class MetricFunctions:
    """script: as it was at its first step; evaluating: at the end of the pass `seen`, whose innermost loop is `loop`. left: makes
    an error of a sentence. contexts: of autocast, around a batch."""

    def __init__(
        self, script: Script, evaluating: Script, seen: SeenPass, loop: Loop, left: Callable[[str], UntranslatedError]
    ) -> None:  # fmt: skip
        self._script, self._evaluating, self._seen, self._loop, self._left = (
            script,
            evaluating,
            seen,
            loop,
            left,
        )
        assert isinstance(loop.node, ast.For)
        route = evaluating.route
        self._statements, self.contexts = _flat(evaluating, loop.node.body)
        shared = {id(each.node) for each in script.route.setup}
        self._before = [
            each
            for each in route.before
            if isinstance(each.node, ast.Assign) and id(each.node) not in shared and each.depth < len(route.loops)
        ]  # fmt: skip
        self.contexts += [
            each.source.segment(item.context_expr)
            for each in route.contexts
            if isinstance(each.node, ast.With)
            for item in each.node.items
            if _autocasts(evaluating, item.context_expr)
        ]
        self._all = totals_of_pass(evaluating, seen, self._statements)

    @property
    def totals(self) -> list[Total]:
        """Those that depend on the model, and are not what another is divided by."""
        divisors = {each.over for each in self._all}
        return [each for each in self._all if each.name not in divisors and self._uses_model(each)]

    def _uses_model(self, total: Total) -> bool:
        lines, _ = self._slice(used(total.expression), total.at)
        return any(self._models(node) for node in [*lines, total.expression])

    def _models(self, node: ast.AST) -> list[ast.AST]:
        """Expressions in it that are the module that is evaluated, or one around it."""
        return [
            each
            for inner in [node, *self._helpers(used(node))]
            for each in ast.walk(inner)
            if isinstance(each, ast.Name | ast.Attribute) and self._is_model(each)
        ]

    def _helpers(self, names: set[str]) -> list[ast.FunctionDef]:
        """Methods, called by these names, of the object whose loop it is."""
        owner = self._evaluating.route.owner
        return owner.methods_in(names) if owner is not None else []

    def _is_model(self, node: ast.AST) -> bool:
        return self._is_model_itself(self._evaluating.evaluate(node))

    def _is_model_itself(self, value: Any) -> bool:
        model = self._script.watched.model
        if not isinstance(value, nn.Module) or next(value.parameters(), None) is None:
            return False
        return value is model or value is self._seen.module or wraps(value, self._seen.module)

    # --- The text of a metric

    def _slice(self, wanted: set[str], at: int) -> tuple[list[ast.stmt], set[str]]:
        """The statements before place `at` that make the names, and the names that they do not make."""
        kept: list[ast.stmt] = []
        for node in reversed(self._statements[:at]):
            made = bound(node)
            touched = (
                changed(node) & wanted if not is_talk(node) and not list(additions(node)) else set[str]()
            )
            touched = {name for name in touched if not isinstance(self._evaluating.values.get(name), nn.Module)}  # fmt: skip
            if not made & wanted and not touched:
                continue
            if isinstance(node, ast.If) and any(method(each) in ("backward", "step") for each in calls(node)):
                continue
            kept.insert(0, node)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                wanted = wanted - made
            wanted = wanted | used(node)
        return kept, wanted

    def metric(self, name: str, total: Total) -> JobFunction:
        """Raises `UntranslatedError`."""
        divisor = next((each for each in self._all if each.name == total.over), None)
        parts = [total.expression, *([total.weight] if total.weight else []), *([divisor.expression] if divisor else [])]  # fmt: skip
        at = max(total.at, divisor.at if divisor else 0)
        nodes, wanted = self._slice(set[str]().union(*map(used, parts)), at)
        unpacked, names = unpacking(self._evaluating, self._loop)
        assert isinstance(self._loop.node, ast.For)
        index = bound_by(self._loop.node) - names
        if wanted & index:
            raise self._left(f"{min(wanted & index)!r} is the number of a batch, which a metric does not know")  # fmt: skip
        if wanted & {each.name for each in self._all}:
            raise self._left(f"what it adds to {name!r} depends on the batches before")
        outer, wanted = self._outer(wanted - names)
        own = [self._text(self._loop.source, each, statement=True) for each in nodes]
        body = [*outer, *unpacked, *(each for each in own if not is_nothing(each))]
        texts = [self._text(self._loop.source, each) for each in parts]
        returned = texts[0]
        if total.weight is not None:
            returned = f"({texts[0]}) * {_factor(parts[1], texts[1])}, {texts[1]}"
        elif divisor is not None:
            returned = f"{texts[0]}, {texts[-1]}"
        elif total.over == "samples":
            returned = f"{texts[0]}, {self._rows(nodes)}"
        result = [*body, f"return {returned}"]
        for context in reversed(self.contexts):
            result = [f"with {context}:\n" + textwrap.indent("\n".join(result), "    ")]
        owner = self._evaluating.route.owner
        if owner is not None:
            helpers = self._helpers(free_names(result))
            result = [
                *(owner.as_function(each, self._edits(owner.source_of(each), each)) for each in helpers),
                *result,
            ]
        free = free_names(result) - {"model", "batch"}
        constants = {each: self._evaluating.values.get(each) for each in free & names_of_loop(self._script)}
        for each, value in sorted(constants.items()):
            if each in self._script.setup_values:
                continue
            if not isinstance(value, str):
                raise self._left(f"it uses {each!r} of the loop, which a metric does not know")
            result.insert(0, f"{each} = {value!r}")
        return JobFunction(
            function_name(name),
            function_text(f"{function_name(name)}(model, batch)", result),
            [],
            free - set(constants),
        )

    def _outer(self, wanted: set[str]) -> tuple[list[str], set[str]]:
        """Statements before the loop that make the names, but for those that stay in the set-up."""
        texts: list[str] = []
        for line in reversed(self._before):
            made = bound(line.node) & wanted
            if not made or all(self._is_model_itself(self._evaluating.values.get(each)) for each in made):  # fmt: skip
                continue
            text = self._text(line.source, line.node, statement=True)
            wanted = (wanted - made) | used(line.node)
            if text not in texts and len(made) == 1 and text != f"{min(made)} = {min(made)}":
                texts.insert(0, text)
        return texts, wanted

    def _text(self, source: PythonSource, node: ast.AST, *, statement: bool = False) -> str:
        edits = self._edits(source, node)
        return source.statement(node, edits) if statement and isinstance(node, ast.stmt) else source.segment(node, edits)  # fmt: skip

    def _edits(self, source: PythonSource, node: ast.AST) -> list[Replacement]:
        """Without devices and `.item()`, and with the model as the metric is given it."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner = node.func.value
            if (method(node) == "item" and not node.args) or moves(self._evaluating, node):
                text = source.segment(inner, self._edits(source, inner))
                return [(node, text if isinstance(inner, ast.Call | ast.Name | ast.Attribute | ast.Subscript) else f"({text})")]  # fmt: skip
        if isinstance(node, ast.Name | ast.Attribute) and self._is_model(node):
            return [(node, "model")]
        return [each for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.AST) for each in self._edits(source, inner)]  # fmt: skip

    def _rows(self, nodes: Sequence[ast.stmt]) -> str:
        """The number of a batch's samples."""
        assert isinstance(self._loop.node, ast.For)
        rows = self._evaluating.rows_of_batch(self._loop.node.target)
        if rows is not None:
            return f"len({rows})"
        count = len(self._seen.samples)
        for target in ast.walk(self._loop.node.target):
            value = self._evaluating.values.get(target.id) if isinstance(target, ast.Name) else None
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()  # fmt: skip
            for key, each in items:
                if hasattr(each, "shape") and len(each) == count and isinstance(target, ast.Name):
                    return f"len({target.id}[{json.dumps(key)}])"
        raise self._left("no tensor of its batches has a row for each sample")


def function_name(metric: str) -> str:
    """Of the function of a metric."""
    return f"{metric}_of"


def _factor(node: ast.expr, text: str) -> str:
    return text if isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Constant) else f"({text})"


def _autocasts(script: Script, node: ast.expr) -> bool:
    return "autocast" in ast.unparse(node) or type(script.evaluate(node)).__name__ == "autocast"


def _flat(script: Script, body: Sequence[ast.stmt]) -> tuple[list[ast.stmt], list[str]]:
    """The statements of a loop's body and of its `with` statements, and the autocasts among these."""
    found: list[ast.stmt] = []
    contexts: list[str] = []
    for node in body:
        if isinstance(node, ast.With):
            inner, more = _flat(script, node.body)
            own = [
                ast.unparse(each.context_expr) for each in node.items if _autocasts(script, each.context_expr)
            ]
            found, contexts = [*found, *inner], [*contexts, *own, *more]
        else:
            found.append(node)
    return found, contexts


def wraps(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module has all parameters of the model, as `DataParallel` has."""
    own = {id(each) for each in model.parameters()}
    return own <= {id(each) for each in module.parameters()}
