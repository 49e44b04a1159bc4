"""What was found on a GPU as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def page(record: Mapping[str, Any]) -> str:
    """record: of `main.py`."""
    rows = [row for part in record["parts"] for row in part["rows"]]
    counts = Counter(row["status"] for row in rows)
    environment = record["environment"]
    where = ", ".join(environment["gpus"]) or "no GPU: a rehearsal on the CPU"
    lines = [
        "# On a GPU",
        "",
        f"{where}; torch {environment['torch']}, CUDA {environment['cuda']}, Python {environment['python']}, {environment['machine']}.",
        "",
        ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "refused", "not run"))
        + ".",
    ]
    for part in record["parts"]:
        lines += ["", f"## {part['part']}", "", f"{part['seconds']} s", "", "| | | |", "|---|---|---|"]
        lines += [
            f"| {_cell(row['name'])} | {row['status']} | {_cell(row['text'])} |" for row in part["rows"]
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:600]
