"""Where the host waits for the device, and what is copied between them: with the functions of product code."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import FrameType

import meshloom
from tests.second_device.device import HostAccess

PRODUCT = Path(meshloom.__file__).parent
OTHERS = "the job's own code"
# within these, chunks are computed
IN_CHUNKS = ("pipeline/runtime/run.py", "replica/module_engine.py")


class HostAccesses:
    """A listener. found: kind of meeting -> function of product code -> number. in_chunks: how many of the waits were while
    chunks were computed. left: operators that the device had to do at each wait. num_bytes: by kind."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {kind: Counter() for kind in ("wait", "to host", "from host")}
        self.num_bytes: Counter[str] = Counter()
        self.in_chunks = 0
        self.left: list[int] = []

    def __call__(self, access: HostAccess) -> None:
        lines = [
            line for line in product_lines(inspect.currentframe()) if not line.startswith("core/device/")
        ]
        self.found[access.kind][lines[0] if lines else OTHERS] += 1
        self.num_bytes[access.kind] += access.num_bytes
        if access.kind == "wait" and lines:
            self.left.append(access.left)
            self.in_chunks += any(line.startswith(IN_CHUNKS) for line in lines)

    def count(self, kind: str) -> int:
        """Without those of the job's own code."""
        return sum(number for line, number in self.found[kind].items() if line != OTHERS)

    def said(self, kind: str) -> str:
        """Where, as words."""
        return ", ".join(f"{line} ({number})" for line, number in sorted(self.found[kind].items()))


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
