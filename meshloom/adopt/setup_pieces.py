"""The set-up of a script as functions of a job: the model, the optimizer, the schedule."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.adopt.totals import Scheduled
from meshloom.adopt.watching.modules import numbers_within
from meshloom.adopt.watching.route import Line, binds, slice_of
from meshloom.adopt.watching.script import NO_CHANGE, Script, is_talk, one_refusal, seeds, uses
from meshloom.adopt.watching.source import Replacement, bound, calls, changed, method, used

WRAPPERS = ("compile", "DataParallel", "DistributedDataParallel", "DDP")


@dataclass(frozen=True)
class JobFunction:
    """A function of the job. text: its definition. lines: the statements that it is made of. needs: names that it uses."""

    name: str
    text: str
    lines: list[Line]
    needs: set[str]


def model_piece(script: Script) -> JobFunction:
    """Raises `UntranslatedError`."""
    name = script.model
    if name is None:
        raise one_refusal(
            script, script.watched.frames[-1].line,
            "no module that the set-up names has all parameters that the optimizer trains. Put the parts into one nn.Module, whose parameters the optimizer takes.",
        )  # fmt: skip

    def takes(line: Line, wanted: set[str]) -> bool:
        node = line.node
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) and line.frame == 0:
            return False
        if binds(line, wanted):
            return True
        return (
            bool(changed(node) & wanted) and not is_talk(node) and not _leaves_unchanged(script, node, wanted)
        )

    lines, needs = slice_of(
        script.route.setup,
        {name},
        lambda each: script.holds_modules(each) or _made_from(script, each, script.model_names),
        takes,
    )
    texts: list[str] = []
    seeding = [each for each in script.route.setup if seeds(each.node) and each.at < lines[0].at and "manual_seed" in each.source.segment(each.node)]  # fmt: skip
    if seeding:
        texts.append(seeding[-1].source.segment(seeding[-1].node))
        needs |= used(seeding[-1].node)
        script.because(
            lines[0].at,
            "the model is drawn from the script's seed, here too, since every rank builds it for itself",
        )
    for line in lines:
        text = line.source.statement(line.node, _without_devices(script, line))
        if not _is_nothing(text):
            texts.append(text)
        else:
            needs -= used(line.node)
    needs |= (
        set[str]().union(*(used(node) for text in texts for node in ast.parse(text).body))
        - {name}
        - set[str]().union(*(bound(each.node) for each in lines))
    )
    script.because(lines[0].at, f"each rank builds {name} for itself: Job(model=...) is a function")
    return JobFunction("make_model", _function("make_model()", [*texts, f"return {name}"]), lines, needs)


def optimizer_piece(script: Script, model: JobFunction) -> JobFunction:
    """Raises `UntranslatedError`."""
    name = script.optimizer
    if name is None:
        raise one_refusal(
            script, script.watched.frames[-1].line, "the optimizer has no name in the set-up. Give it one before the loop."
        )  # fmt: skip
    own = {id(each.node) for each in model.lines}

    def takes(line: Line, wanted: set[str]) -> bool:
        node = line.node
        if id(node) in own:
            if binds(line, {name}):
                raise line.refuse("one statement makes the model and the optimizer. Make them in two.")
            return False
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            return False
        if binds(line, wanted):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                raise line.refuse("one statement makes the optimizer and something else. Make them in two.")
            return not bound(node) & script.model_names
        touched = changed(node) & wanted
        return bool(touched) and not is_talk(node) and not _leaves_unchanged(script, node, wanted)

    lines, needs = slice_of(
        script.route.setup,
        {name},
        lambda each: script.holds_parameters(each) or _made_from(script, each, script.model_names),
        takes,
    )
    texts = [each.source.statement(each.node, _of_named(script, each)) for each in lines]
    needs -= script.model_names
    if any("ParametersOf" in each for each in texts):
        needs.add("ParametersOf")
    needs |= {type(script.watched.model).__name__} if any("ParametersOf" in each for each in texts) else set()
    script.because(
        lines[0].at,
        "the optimizer takes the (name, parameter) pairs that each rank gives it, in place of model.parameters()",
    )
    if len(texts) == 1 and len(lines) == 1 and isinstance(lines[0].node, ast.Assign):
        value = lines[0].source.segment(lines[0].node.value, _of_named(script, lines[0]))
        return JobFunction(
            "make_optimizer", _function("make_optimizer(named)", [f"return {value}"]), lines, needs
        )
    return JobFunction(
        "make_optimizer", _function("make_optimizer(named)", [*texts, f"return {name}"]), lines, needs
    )


def _made_from(script: Script, name: str, names: set[str]) -> bool:
    """Whether a statement of the set-up makes it from one of the names."""
    if name in names:
        return False
    return any(
        name in bound(each.node) and uses(each.node, names)
        for each in script.route.setup
        if isinstance(each.node, ast.Assign)
    )


def scheduler_piece(
    script: Script, per_epoch: str | None, by_metric: Sequence[Scheduled] = ()
) -> JobFunction | None:
    """The function that makes the schedulers that are stepped on the way. per_epoch: steps of an epoch. by_metric: schedulers that evaluations
    step, each with its metric. Raises `UntranslatedError`."""
    stepped = [name for name in script.schedulers if _stepping(script, name) is not None]
    if not stepped:
        return None
    texts: list[str] = []
    lines: list[Line] = []
    needs: set[str] = set()
    returned: list[str] = []
    for name in stepped:
        depth, node = _stepping(script, name) or (0, None)
        scheduled = _scheduled(script, name, getattr(node, "lineno", 0), by_metric)
        mine, others = slice_of(script.route.setup, {name}, lambda each: each in script.schedulers, _makes)
        lines += mine
        needs |= others
        texts += [each.source.statement(each.node) for each in mine]
        data = script.data_loop
        if scheduled is not None:
            script.because(
                getattr(node, "lineno", 0),
                f"{name} is stepped after each evaluation, with its {scheduled.metric!r}, by all ranks",
            )
            of = scheduled.of if scheduled.of and scheduled.of.divided else None
            # a threshold by proportion is the same for every multiple of a metric
            itself = (
                of is None
                or of.text == "value"
                or (script.setup_values[name].threshold_mode == "rel" and not of.names)
            )
            more = "" if of is None or itself else f", lambda value: {of.text}"
            needs |= of.names if of is not None and more else set()
            returned.append(f'ml.ByMetric({name}, "{scheduled.metric}"{more})')
        elif data is not None and depth <= data.depth:
            script.because(
                getattr(node, "lineno", 0),
                f"{name} is stepped once in an epoch, and a job's scheduler in every step: OnceIn counts",
            )
            needs |= {"OnceIn", *_names_in(per_epoch or "")}
            returned.append(f"OnceIn({per_epoch}, {name})")
        else:
            returned.append(name)
    script.because(
        lines[0].at, "the schedule is a function of the optimizer, which each rank makes for itself"
    )
    result = returned[0] if len(returned) == 1 else f"[{', '.join(returned)}]"
    needs -= {script.optimizer or ""}
    return JobFunction(
        "make_scheduler",
        _function(f"make_scheduler({script.optimizer})", [*texts, f"return {result}"]),
        lines,
        needs,
    )


def _scheduled(script: Script, name: str, at: int, by_metric: Sequence[Scheduled]) -> Scheduled | None:
    """With what a ReduceLROnPlateau is stepped; None of other schedulers. at: the line where it is. Raises
    `UntranslatedError`."""
    scheduler = script.setup_values[name]
    if not isinstance(scheduler, ReduceLROnPlateau):
        return None
    found = next((each for each in by_metric if each.scheduler is scheduler), None)
    if found is None:
        raise one_refusal(
            script, at, f"{name}.step(...) takes a measured value, which is no metric of an evaluation in the job. Step it right after each pass over held-out data, "
            "with a mean over its samples, or give Job(scheduler=...) by hand, like ml.ByMetric(scheduler, 'val_loss')."
        )  # fmt: skip
    if scheduler.threshold_mode != "rel" and not (found.of and found.of.divided):
        raise one_refusal(
            script, at, f"{name} has a threshold of {scheduler.threshold:g} itself (threshold_mode='abs'), and what it is stepped with is no known "
            "function of a mean over the data. Use threshold_mode='rel', or give Job(scheduler=...) by hand."
        )  # fmt: skip
    return found


def _makes(line: Line, wanted: set[str]) -> bool:
    return binds(line, wanted) and not isinstance(line.node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom)


def _stepping(script: Script, name: str) -> tuple[int, ast.AST] | None:
    """How many loops of the way are around `name.step()`, and the call."""
    scheduler = script.setup_values[name]
    found: tuple[int, ast.AST] | None = None
    for loop in script.route.loops:
        for node in script.statements_of(loop):
            for call in calls(node):
                if (
                    method(call) == "step"
                    and isinstance(call.func, ast.Attribute)
                    and script.evaluate(call.func.value) is scheduler
                ):
                    found = (loop.depth + 1, call)
    return found


def _leaves_unchanged(script: Script, node: ast.stmt, wanted: set[str]) -> bool:
    """Whether it calls a method that a job has no use for, as `model.train()`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return isinstance(node, ast.If) and _did_not_run(script, node)
    if method(node.value) == "eval" and isinstance(node.value.func, ast.Attribute):
        return script.evaluate(node.value.func.value) is script.watched.model
    return method(node.value) in NO_CHANGE


def _did_not_run(script: Script, node: ast.If) -> bool:
    ran: set[int] = set().union(*script.watched.lines.values())
    return not node.orelse and not any(each.lineno in ran for each in node.body)


def _without_devices(script: Script, line: Line) -> list[Replacement]:
    found: list[Replacement] = []
    for call in calls(line.node):
        if not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        if isinstance(call.func, ast.Attribute) and moves(script, call):
            inner = line.source.segment(call.func.value, _without_devices_in(script, line, call.func.value))
            found.append((call, inner))
            script.because(line.at, "a job puts the model and its batches on each rank's device")
        elif method(call) in WRAPPERS and call.args:
            found.append((call, line.source.segment(call.args[0])))
            script.because(line.at, f"{method(call)} is the plan's choice: compile=, dp=")
    return found


def _without_devices_in(script: Script, line: Line, node: ast.AST) -> list[Replacement]:
    return [
        (call, line.source.segment(call.func.value))
        for call in calls(node)
        if isinstance(call.func, ast.Attribute) and moves(script, call)
    ]


def moves(script: Script, call: ast.Call) -> bool:
    """Whether a call is `x.to(device)` or `x.cuda()`, and no change of dtype."""
    if method(call) in ("cuda", "cpu"):
        value = script.evaluate(call.func.value) if isinstance(call.func, ast.Attribute) else None
        return value is not torch and all(script.is_device(each) for each in call.args)
    others = [each for each in call.keywords if each.arg not in ("device", "non_blocking")]
    given = [*call.args, *(each.value for each in call.keywords if each.arg == "device")]
    return method(call) == "to" and not others and len(given) == 1 and script.is_device(given[0])


def _of_named(script: Script, line: Line) -> list[Replacement]:
    """The model's parameters as those that the function is given."""
    found: list[Replacement] = []
    models = script.model_names
    handled: set[int] = set()
    for call in calls(line.node):
        if not isinstance(call.func, ast.Attribute):
            continue
        receiver = call.func.value
        if isinstance(receiver, ast.Name) and receiver.id in models:
            text = {"parameters": "[parameter for _, parameter in named]", "named_parameters": "named"}.get(
                call.func.attr
            )
            if text is not None:
                found.append((call, text))
            else:
                rest = "".join(f", {line.source.segment(each)}" for each in [*call.args, *call.keywords])
                found.append(
                    (
                        call,
                        f"{type(script.watched.model).__name__}.{call.func.attr}(ParametersOf(named){rest})",
                    )
                )
            handled.add(id(receiver))
    found += [
        (each, "ParametersOf(named)")
        for each in ast.walk(line.node)
        if isinstance(each, ast.Name)
        and each.id in models
        and id(each) not in handled
        and isinstance(each.ctx, ast.Load)
    ]
    parts = {name for name in used(line.node) if script.holds_modules(name) and name not in models}
    if parts:
        raise line.refuse(
            f"the optimizer is made from {', '.join(sorted(parts))}. Name them as parts of the model: model.{min(parts)}.parameters()."
        )
    return found


def _is_nothing(text: str) -> bool:
    """`model = model`, or `model`, also under a condition."""
    body = ast.parse(text).body
    if len(body) != 1:
        return False
    node = body[0]
    if isinstance(node, ast.If) and not node.orelse:
        return all(_is_nothing(ast.unparse(each)) or is_talk(each) for each in node.body)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0]) == ast.unparse(node.value)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Name)


is_nothing = _is_nothing
did_not_run = _did_not_run


def _function(signature: str, texts: list[str]) -> str:
    return f"def {signature}:\n" + "\n".join(textwrap.indent(each, "    ") for each in texts)


function_text = _function


def _names_in(expression: str) -> set[str]:
    return used(ast.parse(expression)) if expression else set()


def numbers_of_model(script: Script, line: Line) -> list[Replacement]:
    """What a statement reads of the model as plain numbers, as `model.num_classes`."""
    return list(numbers_within(line.node, dict.fromkeys(script.model_names, script.watched.model)))


def refuse_uses_of_model(script: Script, kept: list[Line]) -> None:
    """The set-up that stays has no model, but for numbers that it keeps. Raises `UntranslatedError`."""
    for line in kept:
        numbers = [each for each, _ in numbers_of_model(script, line)]
        for each in numbers:
            script.because(line.at, f"{ast.unparse(each)} is a number that the model keeps")
        names = {script.model or "", script.optimizer or ""} - bound(line.node)
        names -= {name for name in names if _only_in(line.node, name, numbers)}
        if not isinstance(line.node, ast.FunctionDef | ast.ClassDef) and uses(line.node, names):
            name = min(used(line.node) & names)
            raise line.refuse(
                f"the job's data, loss or settings need what this line computes from {name!r}, which only ranks have. Compute it without {name!r}, or in the loss."
            )


def _only_in(node: ast.AST, name: str, inner: list[ast.AST]) -> bool:
    """Whether a name stands in these nodes alone."""
    within = {id(one) for each in inner for one in ast.walk(each)}
    return all(
        id(each) in within for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == name
    )
