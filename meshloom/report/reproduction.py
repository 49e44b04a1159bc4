"""What a failing verification leaves for who looks for the mistake: the first tensor that differs, of both sides, and how to see it
again."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from meshloom.core.errors import ReportError
from meshloom.verify.findings import Report, lines_of

TENSORS, TEXT = "tensors.safetensors", "README.txt"


def write_reproduction(report: Report, directory: Path, command: str) -> None:
    """Write into `directory`, which is made, where the report differs in a tensor of a step; else the text alone. Raises
    `ReportError`."""
    wrong, found = report.first_wrong, report.differing
    text = [f"To see it again: {command}", ""]
    if found is not None:
        text += [
            f"{TENSORS} has the {found.kind} of {found.name} in step {found.step}: `plan` and `one_device`.",
            "",
        ]
    if wrong and wrong.first_module:
        text += [f"First module: {wrong.first_module}", ""]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if found is not None:
            pair = {"plan": found.plan, "one_device": found.one_device}
            save_file(
                {name: each.detach().cpu().contiguous().clone() for name, each in pair.items()},
                directory / TENSORS,
            )
        (directory / TEXT).write_text("\n".join([*text, *lines_of(report), ""]), encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"{directory} cannot be written: {error.strerror}. Give a directory that can be made."
        ) from None
