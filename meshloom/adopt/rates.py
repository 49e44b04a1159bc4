"""What the loop of a script does around the optimizer's step: rates that are set by hand, clipping, averages of parameters."""

from __future__ import annotations

import ast

from meshloom.adopt.counters import as_function_of_step
from meshloom.adopt.loop_pieces import free_names, names_of_loop, uses_batch
from meshloom.adopt.setup_pieces import JobFunction, function_text
from meshloom.adopt.watching.route import Line, binds
from meshloom.adopt.watching.script import Script, one_refusal
from meshloom.adopt.watching.source import bound, calls, method, roots, used


def rates_piece(script: Script) -> JobFunction | None:
    """Statements of the loop that set the optimizer's rates. Raises `UntranslatedError`."""
    optimizers = {
        name
        for name, value in script.values.items()
        if any(value is each for each in script.watched.optimizers)
    }
    setting = [
        each
        for each in [*script.route.body, *script.route.beside]
        if _sets_rates(script, each.node, optimizers)
    ]
    if not setting:
        return None
    own = [each for each in [*script.route.body, *script.route.beside] if each.depth]
    wanted: set[str] = set().union(*(used(each.node) for each in setting))
    lines: list[Line] = []
    for line in reversed(own):
        if line in setting or (
            binds(line, wanted) and line.at <= setting[-1].at and not uses_batch(script, line)
        ):
            lines.insert(0, line)
            wanted |= used(line.node)
    made: set[str] = set()
    texts: list[str] = []
    for name in sorted(wanted - optimizers):
        if name in names_of_loop(script) and not any(
            name in bound(each.node) for each in lines if not isinstance(each.node, ast.AugAssign)
        ):
            text = as_function_of_step(script, name, "step")
            if text is None:
                raise setting[0].refuse(
                    f"{name!r} changes in the loop, and is no number that goes up evenly. Set the rate as a function of the step's number."
                )
            texts.append(f"{name} = {text}")
            made.add(name)
    lines = [each for each in lines if not bound(each.node) & made]
    texts += [each.source.statement(each.node) for each in lines]
    alias = sorted(optimizers & wanted)
    script.because(setting[0].at, "the rate is a function of the step, called before each one")
    needs = free_names(texts) - optimizers - {"step"}
    return JobFunction("set_rates", function_text(f"set_rates({alias[0]}, step)", texts), lines, needs)


def clip_expression(script: Script) -> tuple[str, int] | None:
    """The largest norm, as the script has it, and its line. Raises `UntranslatedError`."""
    if not script.watched.clips:
        return None
    name, norm, kind, line = script.watched.clips[0]
    if name != "clip_grad_norm_" or kind != 2.0:
        what = f"{name}(...)" if name != "clip_grad_norm_" else f"clip_grad_norm_(norm_type={kind:g})"
        raise one_refusal(
            script,
            line,
            f"{what} has no counterpart. A job clips the 2-norm of the whole gradient: clip_grad_norm_(model.parameters(), max_norm).",
        )
    for source in script.route.sources:
        for call in calls(source.tree):
            if method(call) == name and call.lineno <= line <= (call.end_lineno or 0):
                given = [each.value for each in call.keywords if each.arg == "max_norm"] or call.args[1:2]
                if used(given[0]) <= set(script.setup_values) | set(script.watched.frames[0].globals):
                    return source.segment(given[0]), line
    return f"{norm:g}", line


def average_expression(script: Script, loss_needs: set[str]) -> str | None:
    """The decay of the moving average that the script keeps of its parameters, as it has it. loss_needs: names that the loss
    uses: an average that it is computed from is a part of the model."""
    average = script.watched.average
    if average is None or average.name in loss_needs:
        return None
    texts: dict[str, float] = {
        name: value for name, value in script.setup_values.items() if type(value) is float
    }
    for source in script.route.sources:
        for node in ast.walk(source.tree):
            value = script.evaluate(node) if isinstance(node, ast.Attribute | ast.Constant) else None
            known = isinstance(node, ast.Constant) or used(node) <= set(script.setup_values) - {average.name}
            if type(value) is float and known:
                texts.setdefault(ast.unparse(node), value)
    near = [
        (round(abs(value - average.decay), 9), not text[0].isalpha(), text)
        for text, value in texts.items()
        if 0 < value < 1 and abs(value - average.decay) <= 0.05 * (1 - value)
    ]
    if not near:
        return None
    made = [each for each in script.route.setup if average.name in bound(each.node)]
    at = made[-1].at if made else script.first.line[1]
    script.because(at, "the run keeps the average of the parameters itself, sharded as they are updated")
    return min(near)[2]


def _sets_rates(script: Script, node: ast.stmt, optimizers: set[str]) -> bool:
    """`for group in optimizer.param_groups: group["lr"] = ...`, `optimizer.param_groups[0]["lr"] = ...` or a function of the user's
    that is given the optimizer."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Subscript)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.slice, ast.Constant)
            and each.slice.value == "lr"
        ):
            inside = {
                name for loop in ast.walk(node) if isinstance(loop, ast.For) for name in roots(loop.iter)
            } | roots(each)
            if inside & optimizers:
                return True
    if (
        isinstance(node, ast.Expr | ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
    ):
        given = {
            each.id
            for each in [*node.value.args, *(one.value for one in node.value.keywords)]
            if isinstance(each, ast.Name)
        }
        called = script.values.get(node.value.func.id)
        on_way = {each.function for each in script.watched.frames}
        return (
            bool(given & optimizers)
            and callable(called)
            and node.value.func.id not in on_way
            and not given & script.model_names
        )
    return False
