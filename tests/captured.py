"""A captured program as text, and compared with the job's own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshloom.core.job import Job
from meshloom.program.capture.check import Difference, check_against_module
from meshloom.program.ir.nodes import Ref, operator_name
from meshloom.program.ir.program import Program
from meshloom.program.trace.precision import build_model
from meshloom.program.trace.repeated_export import one_thread


def described(program: Program) -> str:
    """The program as text: its variables, and one line per node."""
    lines = [
        f"parameter {name}: {each.meta}{_also(each.aliases)}" for name, each in program.parameters.items()
    ]
    lines += [f"buffer {name}: {each.meta}{_also(each.aliases)}" for name, each in program.buffers.items()]
    lines += [
        f"constant {name}: {str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
        for name, each in program.constants.items()
    ]
    lines += [f"input {each.name}: {each.meta}" for each in program.inputs]
    names = {each.value: name for name, each in (*program.parameters.items(), *program.buffers.items())}
    names |= {each.value: each.name for each in program.inputs}
    for node in program.nodes:
        operands = [_text(each, names) for each in node.args]
        operands += [f"{key}={_text(each, names)}" for key, each in node.kwargs.items()]
        outputs = ", ".join(map(str, node.outputs)) or "number"
        notes = [node.path, str(node.context), f"draw {node.draw}" if node.draw is not None else ""]
        call = f"{node.name} = {node.operator}({', '.join(operands)}) -> {outputs}"
        lines.append(f"{call}  # {'; '.join(filter(None, notes))}".rstrip("# "))
    lines += [f"update {name} = {each}" for name, each in program.updates.items()]
    lines += [f"updated while running: {name}" for name in sorted(program.in_place)]
    return "\n".join([*lines, f"return {', '.join(_text(each, names) for each in program.outputs)}"])


def _also(aliases: tuple[str, ...]) -> str:
    return f", also {', '.join(aliases)}" if aliases else ""


def _text(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return names.get(value.name, value.name)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(each, names) for each in value)}]"
    return operator_name(value) if hasattr(value, "_schema") else str(value)


def check_against_eager(
    program: Program, job: Job, batches: Sequence[Any], *, tolerance: float | None = None
) -> Difference:
    """Run the program and the job's own model on each of `batches`. Raises `CaptureError` where they differ,
    naming the first module that does.

    The model is in the precision of the capture. tolerance: as in `check_against_module`.
    """
    with one_thread():
        model = build_model(job, program.precision, training=program.training, beside=batches[0])
        return check_against_module(program, model, job.loss, batches, tolerance=tolerance)
