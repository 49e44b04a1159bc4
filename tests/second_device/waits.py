"""Where the host waits for the device, with the functions of product code."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import FrameType

import meshloom
from tests.second_device.device import Wait

PRODUCT = Path(meshloom.__file__).parent
# within these, chunks are computed
IN_CHUNKS = ("pipeline/runtime/run.py", "replica/module_stages.py")


class Waits:
    """A listener. found: function of product code -> number of waits, without those of the job's own code. in_chunks: how
    many of them were while chunks were computed. left: operators that the device had to do at each."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.in_chunks = 0
        self.left: list[int] = []

    def __call__(self, wait: Wait) -> None:
        lines = [
            line for line in product_lines(inspect.currentframe()) if not line.startswith("core/device/")
        ]
        if lines:
            self.found[lines[0]] += 1
            self.left.append(wait.left)
            self.in_chunks += any(line.startswith(IN_CHUNKS) for line in lines)

    def __str__(self) -> str:
        return ", ".join(f"{line} ({number})" for line, number in sorted(self.found.items()))


def product_lines(frame: FrameType | None) -> list[str]:
    """The functions of product code under way, innermost first; none if the job's code or its optimizer called."""
    lines: list[str] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PRODUCT):
            lines.append(f"{path.relative_to(PRODUCT).as_posix()} {frame.f_code.co_qualname}")
        elif not lines and (path.name.endswith("jobs.py") or "torch/optim" in path.as_posix()):
            return []
        frame = frame.f_back
    return lines
