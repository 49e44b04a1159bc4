"""What depends on torch's minor version, and on nothing else of the machine: how many operators a step runs on each rank, and the peaks of its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.core.plan import Plan
from tests.golden.exact_jobs import JOBS
from tests.golden.exact_runs import divided_readily
from tests.live_bytes import live_bytes

FILE = f"torch-{'.'.join(torch.__version__.split('.')[:2])}"
CASES = (
    ("mlp", "dp=2,microbatches=2"), ("mlp", "dp=2,zero=1"), ("mlp", "dp=2,zero=3"), ("mlp", "tp=2"), ("mlp", "pp=2,microbatches=2"),
    ("mlp", "dp=2,recompute=full"), ("tied", "dp=2,zero=2"), ("tied", "tp=2"), ("groups", "dp=2,tp=2,zero=1"), ("embedded", "pp=2,microbatches=2,schedule=zb-h1"),
)  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts what runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def operators() -> dict[str, str]:
    """Of the second step, and the peaks until there, in bytes."""
    found: dict[str, str] = {}
    for name, text in CASES:
        plan = Plan.parse(text)
        modes = [Operators() for _ in range(plan.mesh.size)]
        with divided_readily():
            peaks = live_bytes(JOBS[name], plan, steps=2, beside=modes)
        for rank, (mode, peak) in enumerate(zip(modes, peaks, strict=True)):
            found[f"{name} under {text}, rank {rank}: peaks"] = "\n".join(
                f"{phase} {size}" for phase, size in peak.items()
            )
            found[f"{name} under {text}, rank {rank}: operators"] = "\n".join(
                f"{operator} {count}" for operator, count in sorted(mode.counts.items())
            )
    return found
