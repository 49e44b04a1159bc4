"""Python time of a step's own machinery on a CPU, without a device: of a program's run per operator, and of hooks and
buckets per parameter.

    python benchmarks/overhead/main.py --json -

A model of 2,000 tiny operators, forward and backward: as the bare module, as the program captured from it, and as that
program with its activations recomputed. Seconds are of the process's CPU time, the least of all rounds, so that other
processes do not count. Of the buckets, the copy of each gradient into its bucket, which any bucket makes, is measured
beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.exchange.all_reduce import AllReduce
from meshloom.program.capture.capture import capture
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.recompute.recompute import with_recomputation
from meshloom.program.run.execute import run_flat

sys.path.append(str(Path(__file__).parents[1]))
from records import write_records

NUM_LAYERS = 500  # of four operators
NUM_PARAMETERS = 2000


class Tiny(nn.Module):
    """[batch, 4] -> the same, by operators on a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4) * 0.1) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x * weight) + x * 0.5
        return x


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class Nobody:
    """A group of two whose other rank adds nothing, at once."""

    size, rank = 2, 0

    def all_reduce(self, *_: Any) -> Nobody:
        return self

    def wait(self) -> None:
        """Nothing is on its way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = [*time_programs(arguments.rounds), *time_buckets(arguments.rounds)]
    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()), file=sys.stderr)
    write_records(records, arguments.json)
    return 0


def time_programs(num_rounds: int) -> list[dict[str, Any]]:
    """Forward and backward of the tiny operators in three ways, in turns."""
    batch, other = {"x": torch.randn(3, 4)}, {"x": torch.randn(3, 4)}
    job = ml.Job(
        model=Tiny, loss=mean_square, optimizer=lambda named: torch.optim.SGD([each for _, each in named], 0.1), data=list, batch_size=3, steps=1,
    )  # fmt: skip
    program = capture(job, (batch, other))
    again = with_recomputation(program, "full")
    model, inputs = Tiny(), list(leaves_of(batch).tensors.values())
    parameters = dict(model.named_parameters())
    ways: dict[str, Callable[[], Tensor]] = {
        "bare module": lambda: mean_square(model, batch),
        "program": lambda: run_flat(program, parameters, {}, inputs)[0],
        "program, recompute=full": lambda: run_flat(again, parameters, {}, inputs)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds + 2):
        for name, forward in ways.items():
            model.zero_grad()
            started = time.process_time()
            forward().backward()
            if number > 1:
                seconds[name].append(time.process_time() - started)
    bare = min(seconds["bare module"])
    return [
        {
            "what": name, "operators": len(program.nodes), "ms": round(min(each) * 1e3, 3), "of_bare": round(min(each) / bare, 3),
            "own_us_per_operator": round((min(each) - bare) / len(program.nodes) * 1e6, 3),
        }
        for name, each in seconds.items()
    ]  # fmt: skip


def time_buckets(num_rounds: int) -> list[dict[str, Any]]:
    """Gradients into buckets, as hooks on parameters report them."""
    named = [(f"p{number}", nn.Parameter(torch.randn(4))) for number in range(NUM_PARAMETERS)]
    group: Any = Nobody()
    exchange = AllReduce(named, group, bucket_bytes=25 * 2**20, overlap=False)
    buffers = [torch.zeros(4) for _ in named]
    reported, copied = list[float](), list[float]()
    for _ in range(num_rounds):
        exchange.begin_step()
        exchange.begin_last_chunk()
        for _, parameter in named:
            parameter.grad = torch.zeros(4)
        started = time.process_time()
        for _, parameter in named:
            exchange.gradient_ready(parameter)
        reported.append(time.process_time() - started)
        gradients = [torch.zeros(4) for _ in named]
        started = time.process_time()
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.copy_(gradient)
        copied.append(time.process_time() - started)
    all_, copy = (min(each) / NUM_PARAMETERS * 1e6 for each in (reported, copied))
    return [{
        "what": "hooks and buckets", "parameters": NUM_PARAMETERS, "us": round(all_, 3), "copy_us": round(copy, 3),
        "own_us_per_parameter": round(all_ - copy, 3),
    }]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
