"""Statements of the loop and behind it that a job has no counterpart of: named by line, with what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch.amp.grad_scaler import GradScaler

from meshloom.adopt.evaluations import evaluates
from meshloom.adopt.parts import JobParts
from meshloom.adopt.watching.route import Line, Refusal
from meshloom.adopt.watching.script import NO_CHANGE, Script, is_talk, uses
from meshloom.adopt.watching.source import bound, calls, changed, method, used

OF_THE_JOB = {"zero_grad", "step", "backward", "scale", "unscale_", "clip_grad_norm_", "train"}
SAVING = {"save", "save_pretrained", "save_checkpoint", "makedirs", "dump"}


def left_out(script: Script, parts: JobParts) -> Iterator[Refusal]:
    """One for each statement, or run of statements, in order."""
    yield from parts.notes
    own = {id(line.node) for piece in parts.pieces for line in piece.lines}
    refused = {(each.file, each.line) for each in parts.notes}
    lines = [
        each
        for each in [*script.route.body, *script.route.beside, *script.route.after]
        if id(each.node) not in own
    ]
    for line in sorted(lines, key=lambda each: (each.frame, each.at)):
        if parts.evaluation is not None and (evaluates(parts.evaluation, line) or _sets_mode(line.node)):
            continue
        average = script.watched.average
        if parts.average and average is not None and used(line.node) & {average.name}:
            continue
        text = _advice(script, line)
        if text and (line.source.path.name, line.at) not in refused:
            yield Refusal(line.source.path.name, line.at, text)


def _advice(script: Script, line: Line) -> str:
    node = line.node
    if line.at != node.lineno or isinstance(
        node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Return
    ):
        return ""
    names = {method(each) for each in calls(node)}
    owner = script.route.owner
    written = owner.written(line.source) if owner is not None else None
    first = written.lines[line.at - 1].strip() if written else line.source.segment(node).partition("\n")[0]
    evaluates = f"`{first}` is left out: held-out data is measured by Job(evaluate=ml.Evaluate(data=..., metrics=..., every=...))."
    if "eval" in names or _evaluates(script, node):
        return evaluates
    if names & SAVING:
        return f"`{first}` is left out: meshloom train --out DIR saves checkpoints, and meshloom export writes weights."
    if "no_grad" in names:
        return evaluates
    if _steps_scaler(script, node):
        return ""
    if is_talk(node) or _only_talks(node):
        return ""  # a run prints its losses itself
    if names & OF_THE_JOB and not names - OF_THE_JOB - {"parameters", "get_scale", "scale"}:
        return ""
    if isinstance(
        node,
        ast.Assign
        | ast.AugAssign
        | ast.AnnAssign
        | ast.If
        | ast.Break
        | ast.Continue
        | ast.Pass
        | ast.Raise
        | ast.Assert,
    ):
        touched = {name for name in changed(node) if name in script.model_names}
        if not touched:
            return ""  # bookkeeping of the loop
    if (
        bound(node)
        or not names - set(NO_CHANGE)
        or not uses(node, script.model_names | {script.optimizer or ""})
    ):
        return ""  # meters
    return f"`{first}` is left out: a job has no place for it. What was compared does not depend on it; see docs/guide.md for what a job can do."


def _sets_mode(node: ast.stmt) -> bool:
    """`model.eval()`."""
    return isinstance(node, ast.Expr | ast.If) and {method(each) for each in calls(node)} <= {"train", "eval"}


def _steps_scaler(script: Script, node: ast.stmt) -> bool:
    return any(
        isinstance(each.func, ast.Attribute) and isinstance(script.evaluate(each.func.value), GradScaler)
        for each in calls(node)
    )


def _evaluates(script: Script, node: ast.stmt) -> bool:
    """Whether it calls a function of the user's that evaluates."""
    for call in calls(node):
        name = method(call).lower()
        if any(word in name for word in ("test", "eval", "valid", "estimate")) and callable(
            script.values.get(method(call))
        ):
            return True
    return False


def _only_talks(node: ast.stmt) -> bool:
    return isinstance(node, ast.If | ast.For | ast.With) and all(
        is_talk(each)
        or isinstance(each, ast.Assign | ast.AugAssign | ast.Break | ast.Continue | ast.Pass)
        or _only_talks(each)
        for each in node.body
    )
