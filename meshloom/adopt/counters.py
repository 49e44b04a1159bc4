"""Numbers of a loop (`epoch`, `iter_num`, `batch_idx`) as functions of the step, and the number of steps of a run."""

from __future__ import annotations

import ast

from meshloom.adopt.watching.route import Loop
from meshloom.adopt.watching.script import Script, one_refusal
from meshloom.adopt.watching.source import bound, calls, method, used

READABLE = "Let its condition, or the one of its break, compare the number of steps done with a limit."


def steps_of_epoch(script: Script) -> str | None:
    """An expression; None without a data loader."""
    if script.watched.loader is None:
        return None
    accumulated = accumulation(script)
    loop = script.data_loop
    if accumulated and (loop is None or not _is_within(script, loop)):
        if _steps_at_end_of_epoch(script):
            return f"-(-len({loader_name(script)}) // {accumulated})"
        return f"len({loader_name(script)}) // {accumulated}"
    return f"len({loader_name(script)})"


def _steps_at_end_of_epoch(script: Script) -> bool:
    """Whether `if (i + 1) % n == 0 or i + 1 == len(loader):` is around the optimizer's step, so that the last has fewer batches."""
    tests = [
        each.test
        for node in script.statements_of(script.step_loop)
        for each in ast.walk(node)
        if isinstance(each, ast.If) and any(method(call) == "step" for call in calls(each))
    ]
    return any(
        isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and any(method(call) == "len" for call in calls(test))
        for test in tests
    )  # fmt: skip


def loader_name(script: Script) -> str:
    """The data loader in the job."""
    for line in script.route.body if script.loader is None else []:
        for name in bound(line.node):
            if script.values.get(name) is script.watched.loader:
                return name
    return script.loader or ("train_loader" if script.watched.zipped is None else "zipped_loader")


def accumulation(script: Script) -> str | None:
    """An expression: micro-batches of a step; None: one."""
    if script.micro_batches == 1:
        return None
    loop = _micro_loop(script)
    if (
        loop is not None
        and isinstance(loop.node, ast.For)
        and isinstance(loop.node.iter, ast.Call)
        and method(loop.node.iter) == "range"
        and len(loop.node.iter.args) == 1
    ):
        return loop.source.segment(loop.node.iter.args[0])
    names = [
        name for name, value in script.setup_values.items()
        if type(value) is int and value == script.micro_batches and any(word in name.lower() for word in ("acc", "micro"))
    ]  # fmt: skip
    found = names[0] if names else _attribute(script)
    return found or str(script.micro_batches)


def total_steps(script: Script) -> tuple[str, int]:
    """An expression of the run's optimizer steps, and the line that it is read from. Raises `UntranslatedError`."""
    factors: list[str] = []
    per_epoch = steps_of_epoch(script)
    micro, data = _micro_loop(script), script.data_loop
    last = script.route.loops[-1] if script.route.loops else None
    for loop in script.route.loops:
        node = loop.node
        if micro is not None and loop.depth >= micro.depth and loop is not data:
            continue
        if loop is data and isinstance(node, ast.For):
            assert per_epoch is not None
            limit = _taken(script, loop) or _limit(script, loop)
            if script.iterated.repeats(loop) is not None:
                if limit is None:
                    raise one_refusal(script, node.lineno, f"{loop.source.segment(node.iter)} has no end that can be read. {READABLE}")  # fmt: skip
                return limit
            factors.append(
                f"({per_epoch})" if per_epoch.startswith("len(") and "//" in per_epoch else per_epoch
            )
            if limit is not None and not any(
                isinstance(each.node, ast.For) for each in script.route.loops[: loop.depth]
            ):
                return limit
            continue
        if isinstance(node, ast.While):
            limit = _limit(script, loop)
            if limit is None:
                raise one_refusal(script, node.lineno, f"no number of steps can be read from this loop. {READABLE}")  # fmt: skip
            return limit
        counted = _count(script, loop)
        if counted is None:
            raise one_refusal(
                script, node.lineno, f"the loop over {loop.source.segment(node.iter)} has no number of rounds that "
        f"can be read. Loop over range(...) or over a DataLoader that the set-up names."
            )  # fmt: skip
        if counted != "1":
            factors.append(counted)
    assert last is not None
    return " * ".join(factors) or "1", script.route.loops[0].node.lineno


def as_function_of_step(script: Script, name: str, step: str) -> str | None:
    """An expression of `step` for a loop's number, as it was in every step that was watched; None: it is none."""
    seen = [numbers[name] for numbers in script.watched.numbers if name in numbers]
    for loop in script.route.loops:
        if isinstance(loop.node, ast.For) and name in bound_by(loop.node):
            range_call = _range(script, loop)
            data = script.data_loop
            if range_call is not None and data is not None and loop.depth < data.depth:
                start = loop.source.segment(range_call.args[0]) if len(range_call.args) > 1 else "0"
                epoch = (
                    f"{step} // ({steps_of_epoch(script)})"
                    if "//" in (steps_of_epoch(script) or "")
                    else f"{step} // {steps_of_epoch(script)}"
                )
                return epoch if start == "0" else f"{start} + {epoch}"
            if loop is data and script.micro_batches == 1 and not script.iterated.repeats(loop):
                counted = f"{step} % {steps_of_epoch(script)}"
                return f"{seen[0]} + {counted}" if seen and seen[0] else counted
    if len(seen) < 2:
        return None
    start, slope = seen[0], seen[1] - seen[0]
    if slope and all(value == start + slope * index for index, value in enumerate(seen)):
        scaled = step if slope == 1 else f"{slope} * {step}"
        return scaled if not start else f"{start} + {scaled}"
    return None


def bound_by(loop: ast.For) -> set[str]:
    """Names of the loop's target."""
    return {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}


def _micro_loop(script: Script) -> Loop | None:
    """The loop within a step, over its micro-batches."""
    if script.micro_batches == 1:
        return None
    outer = script.step_loop
    inner = [each for each in script.route.loops if each.depth > outer.depth]
    return inner[0] if inner else None


def _is_within(script: Script, loop: Loop) -> bool:
    micro = _micro_loop(script)
    return micro is not None and loop.depth < micro.depth


def _range(script: Script, loop: Loop) -> ast.Call | None:
    if not isinstance(loop.node, ast.For):
        return None
    inner = loop.node.iter
    if isinstance(inner, ast.Call) and method(inner) == "trange":
        return inner
    inner = script.iterated.unwrapped(inner)
    return inner if isinstance(inner, ast.Call) and method(inner) == "range" else None


def _count(script: Script, loop: Loop) -> str | None:
    assert isinstance(loop.node, ast.For)
    call = _range(script, loop)
    if call is not None and len(call.args) == 1:
        return _factor(loop, call.args[0])
    if call is not None and len(call.args) == 2:
        stop, start = call.args[1], call.args[0]
        if (
            isinstance(stop, ast.BinOp)
            and isinstance(stop.op, ast.Add)
            and ast.unparse(stop.right) == ast.unparse(start)
        ):
            return _factor(loop, stop.left)  # range(1, epochs + 1)
        return f"({loop.source.segment(call.args[1])} - {_factor(loop, call.args[0])})"
    if isinstance(loop.node.iter, ast.List | ast.Tuple) and all(
        isinstance(each, ast.Constant) for each in loop.node.iter.elts
    ):
        return "1"  # as `for phase in ["train", "val"]`, of which one trains
    return None


def _factor(loop: Loop, node: ast.expr) -> str:
    text = loop.source.segment(node)
    return f"({text})" if isinstance(node, ast.BinOp) else text


def _limit(script: Script, loop: Loop) -> tuple[str, int] | None:
    """From `while step < limit`, or `if step >= limit: break`."""
    tests: list[tuple[ast.expr, bool]] = [(loop.node.test, True)] if isinstance(loop.node, ast.While) else []
    tests += [
        (test, False)
        for node in ast.walk(loop.node)
        if isinstance(node, ast.If) and any(isinstance(each, ast.Break) for each in node.body)
        for test in (node.test.values if isinstance(node.test, ast.BoolOp) else [node.test])
    ]
    joined = {
        id(value)
        for node in ast.walk(loop.node)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)
        for value in node.values
    }
    for test, goes_on in tests:
        exact = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.NotEq)
        if exact and id(test) in joined:
            continue  # `if step == 0 and eval_only`
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name):
            counted = as_function_of_step(script, test.left.id, "step")
            if counted is None:
                continue
            limit = loop.source.segment(test.comparators[0])
            more = isinstance(test.ops[0], ast.LtE if goes_on else ast.Gt)
            return (f"{limit} + 1" if more else limit), test.lineno
    return None


def _taken(script: Script, loop: Loop) -> tuple[str, int] | None:
    """N of a loop over `islice(batches, N)` or `zip(range(N), batches)`, and its line."""
    assert isinstance(loop.node, ast.For)
    wrappers = script.iterated.wrappers_of(loop.node.iter)
    numbers = [each.args[1] for each in wrappers if method(each) == "islice" and len(each.args) == 2]
    numbers += [
        each.args[0]
        for one in wrappers
        for each in (one.args if method(one) == "zip" else [])
        if isinstance(each, ast.Call) and method(each) == "range" and len(each.args) == 1
    ]
    if not numbers:
        return None
    first, factor = numbers[0], script.micro_batches
    number = loop.source.segment(first)
    return (number if factor == 1 else f"({number}) // {accumulation(script)}"), first.lineno


def _attribute(script: Script) -> str | None:
    """`args.accumulation_steps`, where that is the number of micro-batches."""
    for line in [
        *script.route.before,
        *script.route.beside,
        *([script.route.end] if script.route.end else []),
    ]:
        for node in ast.walk(line.node):
            if (
                isinstance(node, ast.Attribute)
                and type(value := script.evaluate(node)) is int
                and value == script.micro_batches
            ):
                text = line.source.segment(node)
                if any(word in text.lower() for word in ("acc", "micro")) and used(node) <= set(
                    script.setup_values
                ):
                    return text
    return None
