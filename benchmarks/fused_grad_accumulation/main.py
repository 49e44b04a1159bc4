"""Backward of a divided program with its weights' gradients made in the bucket, beside autograd and a copy,
step by step in turns.

One rank of the benchmark GPT under tp=2, and of a wider one with few tokens, on one thread; what it would
send to others is not sent. Seconds are those of the processor, not of the clock. Autograd is measured twice:
what differs between the two is what the machine does by itself.

    python benchmarks/fused_grad_accumulation/main.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.pieces import take
from meshloom.comm.simulated import simulated_groups
from meshloom.core.job import Job
from meshloom.core.step_shape import StepShape
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.alone import Alone
from meshloom.exchange.exchange import Exchange
from meshloom.program.capture.capture import capture
from meshloom.program.ir.program import Program
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator
from meshloom.program.run.execute import run_program
from meshloom.program.run.with_fused_accumulation import with_fused_accumulation
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import Partition, partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import choose, rates_for

sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
import gpt  # pyright: ignore[reportMissingImports]

ROUNDS = 12
WAYS = ("autograd", "autograd again", "accumulator")


class Silent:
    """The group of a rank whose collectives are over at once."""

    rank, size = 0, 2

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *tensors, **settings: self

    def wait(self) -> None:
        """Nothing is under way."""


class Way:
    """A step's chunks, forward and backward, from the same parameters. accumulator: whether gradients are
    made in place."""

    def __init__(
        self, part: Partition, model: nn.Module, batch: list[Tensor], dp: int, *, accumulator: bool
    ) -> None:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.parameters = {
            name: nn.Parameter(take(pieces, 0, state[name].detach()).clone())
            for name, pieces in part.parameters.items()
        }
        self.buffers = {name: take(pieces, 0, state[name]).clone() for name, pieces in part.buffers.items()}
        self.batch = batch
        named = list(self.parameters.items())
        self.exchange: Exchange = (
            Alone(named)
            if dp == 1
            else AllReduce(named, simulated_groups(1)[0], bucket_bytes=2**23, overlap=False)
        )
        self.program: Program = (
            with_fused_accumulation(part.programs[0], DirectAccumulator(self.exchange.buffer))
            if accumulator
            else part.programs[0]
        )
        for parameter in self.parameters.values():
            if ready := self.exchange.hook(parameter):
                parameter.register_post_accumulate_grad_hook(ready)

    def step(self, num_chunks: int) -> float:
        """Seconds of the backwards."""
        group: Any = Silent()
        self.exchange.begin(StepShape(chunks=num_chunks))
        seconds = 0.0
        for _ in range(num_chunks):
            loss = run_program(self.program, self.parameters, self.buffers, self.batch, group=group)
            start = time.process_time()
            loss.backward()
            seconds += time.process_time() - start
            self.exchange.end_chunk()
        return seconds


def peak_bytes(step: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator handed out during a step, beyond what was there before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    found: Any = profile.profiler
    now = most = 0
    for event in sorted(
        (each for each in found.kineto_results.events() if each.name() == "[memory]"),
        key=lambda each: each.start_ns(),
    ):
        now += event.nbytes()
        most = max(most, now)
    return most


def divided(samples: int, size: gpt.Size) -> tuple[Partition, nn.Module, list[Tensor]]:
    """The benchmark GPT's loss of so many samples, over two ranks."""
    data = gpt.make_data(2 * samples, size)
    batches = [[data.tensors[0][:samples]], [data.tensors[0][samples:]]]
    job = Job(
        model=lambda: gpt.make_model(size),
        loss=gpt.loss,
        optimizer=gpt.make_optimizer,
        data=lambda: data,
        batch_size=samples,
        steps=1,
    )
    layout = layout_of(capture(job, (batches[0], batches[1])), BUILT_IN)
    return partition(choose(layout, 2, rates_for(layout.program, 2))), gpt.make_model(size), batches[0]


def compare(size: gpt.Size, batch: int, num_chunks: int, dp: int) -> str:
    """A row of the table."""
    part, model, data = divided(batch // num_chunks, size)
    ways = [Way(part, model, data, dp, accumulator=name == "accumulator") for name in WAYS]
    for way in ways:
        way.step(num_chunks)
    peaks = [peak_bytes(lambda way=way: way.step(num_chunks)) / 2**20 for way in ways]
    rounds: list[list[float]] = []
    for number in range(ROUNDS):
        first = number % len(ways)
        found = {id(way): way.step(num_chunks) for way in (*ways[first:], *ways[:first])}
        rounds.append([found[id(way)] for way in ways])
    seconds = [statistics.median(each) * 1e3 for each in zip(*rounds, strict=True)]
    ratios = [statistics.median(each[way] / each[0] for each in rounds) for way in range(len(ways))]
    cells = [
        str(size.width),
        str(batch),
        str(dp),
        str(num_chunks),
        f"{seconds[0]:.1f}",
        f"{seconds[2]:.1f}",
        *(f"{each:.3f}" for each in ratios[1:]),
    ]
    return f"| {' | '.join([*cells, f'{peaks[0]:.1f}', f'{peaks[2]:.1f}'])} |"


def main() -> None:
    """Print a table: every batch with every number of replicas and chunks."""
    torch.set_num_threads(1)
    heads = [
        "width",
        "batch",
        "dp",
        "chunks",
        "autograd, ms",
        "accumulator, ms",
        "autograd again / autograd",
        "accumulator / autograd",
    ]
    heads += ["peak of autograd, MiB", "of accumulator, MiB"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for batch, num_chunks, dp in ((4, 1, 2), (4, 4, 2), (4, 4, 1), (16, 1, 2), (16, 4, 2)):
        print(compare(gpt.SMALL, batch, num_chunks, dp), flush=True)
    wide = replace(gpt.SMALL, width=1152, blocks=2, length=32)
    for num_chunks, dp in ((1, 2), (4, 2), (4, 1)):
        print(compare(wide, 4, num_chunks, dp), flush=True)


if __name__ == "__main__":
    main()
