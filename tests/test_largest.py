"""A GPT of 175 billion parameters is read, priced and described on a small machine, in half a minute of one
core and four gigabytes."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step import gpt
from meshloom.core.job import Job
from meshloom.planner import describe as planner
from meshloom.planner import readings
from meshloom.report.description import print_description

ROOT = Path(__file__).parents[1]
GPT3 = gpt.Size(vocabulary=50257, width=12288, blocks=96, heads=96, length=2048, tied=False)


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def measure() -> None:
    """Prints what describing it takes: seconds of this process, in all and by part, most bytes of memory, and
    what came of it."""
    import_seconds = time.process_time()
    parts: dict[str, float] = {}

    def timed(module: ModuleType, name: str) -> None:
        part: Callable[..., Any] = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            value = part(*args, **kwargs)
            parts[name] = time.process_time() - start
            return value

        setattr(module, name, run)

    for module, name in (
        (readings, "capture_shapes"),
        (readings, "costs"),
        (planner, "predict_memory"),
        (planner, "blocks_of"),
    ):
        timed(module, name)
    job = Job(
        model=lambda: gpt.GPT(GPT3),
        loss=next_token,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        data=lambda: [torch.zeros(GPT3.length + 1, dtype=torch.int64)],
        batch_size=1,
        steps=1,
    )
    start = time.process_time()
    found = planner.describe(readings.Readings(job))
    text = io.StringIO()
    print_description(found, Console(file=text, width=120))
    seconds = time.process_time() - start
    assert found.memory is not None, found.no_memory
    memory = {kind: getattr(found.memory, kind) for kind in ("parameters", "gradients", "optimizer", "peak")}
    print(text.getvalue())
    print(
        json.dumps(
            {
                "seconds": seconds,
                "import_seconds": import_seconds,
                "parts": parts,
                "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "parameters": found.whole.parameters,
                "flops": found.whole.flops,
                "memory": memory,
                "rows": len(text.getvalue().splitlines()),
            }
        )
    )


@pytest.mark.slow
@pytest.mark.processes
def test_175_billion_parameters_are_described_in_half_a_minute_and_four_gigabytes():
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path[:0] = ['tests', '.']; import test_largest; test_largest.measure()",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(done.stdout)
    block = (
        12 * GPT3.width**2 + 13 * GPT3.width
    )  # four times W x W, two of W x 4W; their biases, and two norms
    parameters = GPT3.blocks * block + (2 * GPT3.vocabulary + GPT3.length + 2) * GPT3.width
    assert 174e9 < parameters < 177e9 and found["parameters"] == parameters
    assert (
        found["flops"]
        == GPT3.blocks * (24 * GPT3.length * GPT3.width**2 + 4 * GPT3.length**2 * GPT3.width)
        + 2 * GPT3.length * GPT3.width * GPT3.vocabulary
    )
    memory = found["memory"]
    assert memory["parameters"] == memory["gradients"] == 4 * parameters
    # two averages of each element, and a count for each of less than 2000 tensors
    assert 0 <= memory["optimizer"] - 8 * parameters <= 4 * 2000
    assert memory["peak"] > 16 * parameters
    assert found["rows"] < 100  # blocks that are alike are one
    # Of one core: the clock runs on while others use it, which says nothing of the program.
    assert found["seconds"] + found["import_seconds"] <= 30 and found["bytes"] <= 4e9
