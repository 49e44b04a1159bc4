"""The loop of a script as functions of a job: the loss of a batch, and rates that are set by hand."""

from __future__ import annotations

import ast
import textwrap

from meshloom.adopt.counters import accumulation, as_function_of_step, bound_by, loader_name
from meshloom.adopt.setup_pieces import JobFunction, function_text, is_nothing, moves
from meshloom.adopt.watching.no_batch import no_batch, whole_batch
from meshloom.adopt.watching.route import Line, Loop, binds
from meshloom.adopt.watching.script import NO_CHANGE, Script, is_talk, one_refusal
from meshloom.adopt.watching.source import Replacement, bound, calls, changed, method, used

NOTHING = "\0"  # in place of a statement that goes


def loss_piece(script: Script) -> JobFunction:
    """The statements of the loop that the loss depends on. Raises `UntranslatedError`."""
    end = script.route.end
    assert end is not None
    result = _beginning_of_backward(end)
    expression, divided = _undivided(script, end, result)
    wanted = used(expression) - {"scaler"}
    lines, wanted = _slice(script, wanted)
    wanted -= {
        name
        for name, value in script.values.items()
        if value is script.watched.model and name != script.model
    }
    unpacked, lines, wanted = _batch(script, lines, wanted)
    texts = [*unpacked]
    numbers = _numbers(script, lines, wanted | used(expression))
    texts += numbers
    body: list[str] = []
    for line in lines:
        edits, dropped = _division(script, line)
        divided |= dropped
        text = _without_nothing(line.source.statement(line.node, [*_edits(script, line), *edits]))
        if (not dropped and not is_nothing(text)) or (dropped and edits):
            body.append(text)
    returned = end.source.segment(
        expression, _edits(script, Line(end.source, end.node, end.frame, end.depth, end.at))
    )
    if script.micro_batches > 1 and not divided:
        returned = f"({returned}) * {accumulation(script)}"
        script.because(
            end.at,
            "gradients of several batches are added up without a division, and a job's loss is a mean over all of them",
        )
    elif script.micro_batches > 1:
        script.because(
            end.at,
            "a job's loss is the mean over the batch of a step, whatever its number of micro-batches: nothing is divided",
        )
    if script.sums:
        returned = f"{returned}, {_weight(script, end)}"
    texts = [*_helpers(script, [*body, returned]), *texts]
    contexts = [
        each
        for each in script.route.contexts
        if "autocast" in each.source.segment(each.node).partition(":")[0]
    ]
    body.append(f"return {returned}")
    for context in reversed(contexts):
        assert isinstance(context.node, ast.With)
        items = ", ".join(context.source.segment(each.context_expr) for each in context.node.items)
        body = [f"with {items}:\n" + textwrap.indent("\n".join(body), "    ")]
    texts += body
    names = (
        free_names(texts) & script.model_names
    )  # a function's own name for it may not be that of the set-up
    model = min(names - {script.model}, default=script.model) if script.model not in names else script.model
    texts = [*(f"{each} = {model}" for each in sorted(names - {model})), *texts]
    if _makes_on_device(script, texts):
        name = min(script.device_names())
        texts.insert(0, f"{name} = next({model}.parameters()).device")
    script.because(
        end.at,
        "what the loop does with a batch until backward() is the job's loss; backward and the step are the job's",
    )
    needs = free_names(texts) - {model or "", "batch"}
    return JobFunction("training_loss", function_text(f"training_loss({model}, batch)", texts), lines, needs)


def _helpers(script: Script, texts: list[str]) -> list[str]:
    """Methods of the object whose loop it was that the statements call, as functions within the loss: they read the model."""
    owner = script.route.owner
    if owner is None:
        return []
    found: list[str] = []
    for method_node in owner.methods_in(free_names(texts)):
        line = Line(
            owner.source_of(method_node), method_node, len(script.watched.frames) - 1, 1, method_node.lineno
        )
        found.append(owner.as_function(method_node, _edits(script, line)))
        script.because(line.at, f"{method_node.name} is a part of the loss, which is given the model")
    return found


def _weight(script: Script, end: Line) -> str:
    """The weight of a sum over a batch: the batch's part of a full one."""
    data = script.data_loop
    rows = (
        script.rows_of_batch(data.node.target)
        if data is not None and isinstance(data.node, ast.For)
        else None
    )
    if rows is None or script.micro_batches > 1:
        raise end.refuse(
            "the loss is a sum over the batch. Divide it by the number of samples, or loop over a DataLoader as `for x, y in loader:`, one batch a step."
        )
    script.because(
        end.at,
        "the loss is a sum over the batch: (sum, weight) is the same sum when the batch is divided, and the weight of a full batch is 1",
    )
    return f"len({rows}) / {loader_name(script)}.batch_size"


def uses_batch(script: Script, line: Line) -> bool:
    """Whether a statement gets a batch."""
    return any(method(each) in ("next", script.first.source) and method(each) for each in calls(line.node))


def _beginning_of_backward(end: Line) -> ast.expr:
    """`loss` of `scaler.scale(loss).backward()`."""
    for call in calls(end.node):
        if method(call) == "backward" and isinstance(call.func, ast.Attribute):
            inner = call.func.value
            if isinstance(inner, ast.Call) and method(inner) == "scale" and inner.args:
                return inner.args[0]
            return inner
    raise end.refuse("backward() is called in a way that is not known. Write loss.backward().")


def _without_nothing(text: str) -> str:
    """The text without lines of which nothing is left, but for a comment."""
    return "\n".join(each for each in text.split("\n") if not each.lstrip().startswith(NOTHING))


def _undivided(script: Script, line: Line, node: ast.expr) -> tuple[ast.expr, bool]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_accumulation(script, node.right):
        return node.left, True
    return node, False


def _is_accumulation(script: Script, node: ast.expr) -> bool:
    return script.micro_batches > 1 and script.evaluate(node) == script.micro_batches


def _division(script: Script, line: Line) -> tuple[list[Replacement], bool]:
    """Edits without the division of a loss by the number of micro-batches, and whether there was one. No edits: the
    statement does nothing else."""
    for node in ast.walk(line.node):
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Div)
            and _is_accumulation(script, node.value)
        ):
            return ([] if node is line.node else [(node, NOTHING)]), True
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and _divides(script, node.value)
        ) and ast.unparse(node.targets[0]) == ast.unparse(node.value.left):
            return ([] if node is line.node else [(node, NOTHING)]), True
        if isinstance(node, ast.BinOp) and _divides(script, node):
            return [(node, line.source.segment(node.left))], True
    return [], False


def _divides(script: Script, node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.Div) and _is_accumulation(script, node.right)


def _slice(script: Script, wanted: set[str]) -> tuple[list[Line], set[str]]:
    lines: list[Line] = []
    wanted = set(wanted)
    for line in reversed(script.route.body):
        node = line.node
        touched = changed(node) & wanted - {script.model or ""} - script.model_names
        if binds(line, wanted) or (touched and not is_talk(node) and not _harmless(node)):
            lines.insert(0, line)
            wanted |= used(node)
    return lines, wanted


def _harmless(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and method(node.value) in (*NO_CHANGE, "append", "update", "update_", "add")
    )


def _batch(script: Script, lines: list[Line], wanted: set[str]) -> tuple[list[str], list[Line], set[str]]:
    """Statements that take a batch apart, and the lines left."""
    data = script.data_loop
    if data is not None:
        script.because(data.node.lineno, "the loop over batches is the job's; a loss gets one batch")
        texts, names = unpacking(script, data)
        repeated = script.iterated.repeats(data)
        if repeated is not None:
            script.because(repeated.lineno, "data comes in epochs, each in an order of its own")
        return texts, lines, wanted - names
    getter = script.first.source or "next"
    found = [line for line in lines if uses_batch(script, line)]
    other = [
        line
        for line in [*script.route.body, *script.route.beside, *script.route.setup]
        if uses_batch(script, line) and binds(line, wanted)
    ]
    if any(used(line.node) & carried(lines, script) for line in [*found, *other]):
        found = other = []  # it is made from what the batch before has left
    if not (found or other):
        numbers = _numbers(script, lines, wanted)
        names = whole_batch(script, wanted) if not numbers else []
        if not names:
            raise no_batch(script)
        script.take_whole(names)
        script.because(
            script.first.line[1],
            f"every step is of all rows of {', '.join(names)}, which are one batch: more ranks divide them",
        )
        return [f"{', '.join(names)}{',' if len(names) == 1 else ''} = batch"], lines, wanted - set(names)
    line = (found or other)[0]
    call = next(each for each in calls(line.node) if method(each) == getter)
    script.because(line.at, "batches come from the job's data; a loss gets one batch")
    text = line.source.segment(line.node, [(call, "batch")])
    return (
        ([] if text == "batch = batch" else [text]),
        [each for each in lines if each not in found],
        wanted - bound(line.node),
    )


def unpacking(script: Script, data: Loop) -> tuple[list[str], set[str]]:
    """The statement that takes a batch apart as a loop over batches does, and the names that it binds."""
    assert isinstance(data.node, ast.For)
    target = script.iterated.batch_in(data)
    names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    text = data.source.segment(target)
    if isinstance(target, ast.Tuple) and target.elts[0].col_offset > target.col_offset:  # in parentheses
        text = text[1:-1]
    return ([] if text == "batch" else [f"{text} = batch"]), names


def carried(lines: list[Line], script: Script) -> set[str]:
    """Names of the loop that the lines use before they bind them."""
    before, first = set[str](), set[str]()
    for line in lines:
        first |= used(line.node) - before
        before |= bound(line.node)
    return first & names_of_loop(script) - script.model_names


def names_of_loop(script: Script) -> set[str]:
    """Names that the loops bind."""
    names: set[str] = set()
    for line in [*script.route.body, *script.route.beside]:
        names |= bound(line.node)
    for loop in script.route.loops:
        if isinstance(loop.node, ast.For):
            names |= bound_by(loop.node)
    return names


def _numbers(script: Script, lines: list[Line], wanted: set[str]) -> list[str]:
    """Statements for the loop's numbers that the loss uses. Raises `UntranslatedError` for what a batch leaves to the next."""
    texts: list[str] = []
    batch = script.data_loop
    names_of_batch = (
        bound_by(batch.node) if batch is not None and isinstance(batch.node, ast.For) else set[str]()
    )
    bound_by_lines = set[str]().union(*(bound(line.node) for line in lines))
    seen = carried(lines, script) | (wanted - bound_by_lines) & names_of_loop(script) - script.model_names
    index = _index_name(script)
    for name in sorted(seen):
        if name in names_of_batch - index:
            continue
        value = script.values.get(name)
        if any(
            uses_batch(script, each) and name in bound(each.node)
            for each in [*script.route.body, *script.route.beside]
        ):
            continue
        if (
            any(name in bound_by(each.node) for each in script.route.loops if isinstance(each.node, ast.For))
            and type(value) is not int
            and not isinstance(value, str)
        ):
            continue
        text = as_function_of_step(script, name, "ml.step()") if type(value) is int else None
        if isinstance(value, str):
            text = repr(value)
        if text is None:
            line = next(
                (each for each in [*script.route.body, *script.route.beside] if name in bound(each.node)),
                None,
            )
            refusal = (
                f"{name!r} goes from one batch to the next, and a job's loss is a function of the model and one batch. "
                "Make it anew from each batch, or keep it in a buffer of the model."
            )
            raise line.refuse(refusal) if line else one_refusal(script, script.first.line[1], refusal)
        texts.append(f"{name} = {text}")
        script.because(script.first.line[1], f"{name!r} is a function of the step's number in a job")
    return texts


def _index_name(script: Script) -> set[str]:
    """Names of the numbers beside the batch in the target of the loop over the data loader."""
    data = script.data_loop
    if data is None or not isinstance(data.node, ast.For):
        return set()
    batch = {each.id for each in ast.walk(script.iterated.batch_in(data)) if isinstance(each, ast.Name)}
    return bound_by(data.node) - batch


def _edits(script: Script, line: Line) -> list[Replacement]:
    found: list[Replacement] = []
    for call in calls(line.node):
        if isinstance(call.func, ast.Attribute) and moves(script, call):
            found.append((call, line.source.segment(call.func.value)))
            script.because(line.at, "a job puts batches on each rank's device")
    return found


def _makes_on_device(script: Script, texts: list[str]) -> bool:
    names = script.device_names()
    return any(
        each.arg == "device" and isinstance(each.value, ast.Name) and each.value.id in names
        for text in texts
        for node in _parsed(text)
        for call in calls(node)
        for each in call.keywords
    )


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def free_names(texts: list[str]) -> set[str]:
    """Names that statements use and do not bind before."""
    made: set[str] = set()
    free: set[str] = set()
    for node in (node for text in texts for node in _parsed(text)):
        free |= used(node) - made
        made |= bound(node)
    return free
