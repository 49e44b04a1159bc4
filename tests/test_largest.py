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

from meshloom.core.job import Job
from meshloom.planner import describe as planner
from meshloom.planner import readings
from meshloom.report.description import print_description

ROOT = Path(__file__).parents[1]
BLOCKS, WIDTH, HEADS, VOCABULARY, LENGTH = 96, 12288, 96, 50257, 2048


class Block(nn.Module):
    """A GPT's block with separate q, k, v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
        model=GPT,
        loss=next_token,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        data=lambda: [torch.zeros(LENGTH + 1, dtype=torch.int64)],
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
    block = 12 * WIDTH**2 + 13 * WIDTH  # four times W x W, two of W x 4W; their biases, and two norms
    parameters = BLOCKS * block + (2 * VOCABULARY + LENGTH + 2) * WIDTH
    assert 174e9 < parameters < 177e9 and found["parameters"] == parameters
    assert (
        found["flops"]
        == BLOCKS * (24 * LENGTH * WIDTH**2 + 4 * LENGTH**2 * WIDTH) + 2 * LENGTH * WIDTH * VOCABULARY
    )
    memory = found["memory"]
    assert memory["parameters"] == memory["gradients"] == 4 * parameters
    # two averages of each element, and a count for each of less than 2000 tensors
    assert 0 <= memory["optimizer"] - 8 * parameters <= 4 * 2000
    assert memory["peak"] > 16 * parameters
    assert found["rows"] < 100  # blocks that are alike are one
    # Of one core: the clock runs on while others use it, which says nothing of the program.
    assert found["seconds"] + found["import_seconds"] <= 30 and found["bytes"] <= 4e9
