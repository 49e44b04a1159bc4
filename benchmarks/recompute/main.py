"""Memory saved and time paid by recomputation of the benchmark GPT on one device, predicted next to measured.

    python benchmarks/recompute/main.py --json -

All settings run in one process of one thread, in turns: a round is a few forwards and backwards of each, and
the order is reversed from round to round. They start alike, read the same batches, and must give the same
gradients bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
from gpt import loss, make_data, make_model, make_optimizer
from records import write_records

from meshloom.core.job import Job
from meshloom.planner.memory.measured import measure_memory
from meshloom.program.capture.capture import capture_module
from meshloom.program.cost.cost import costs
from meshloom.program.cost.rates import rates_here
from meshloom.program.ir.program import Program
from meshloom.program.recompute.recompute import recomputed, with_recomputation
from meshloom.program.run.execute import run_program

HOW = ("none", "full", "selective")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="forwards and backwards of each in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = [
        record for size in arguments.batches for record in compare(size, arguments.rounds, arguments.steps)
    ]
    records.append(overhead(arguments.rounds))
    write_records(records, arguments.json)
    for each in records[:-1]:
        print(
            f"batch {each['batch']:3}  {each['recompute']:<10} kept {each['kept_bytes']['predicted'] / 2**20:7.1f} MiB predicted"
            f" {each['kept_bytes']['measured'] / 2**20:7.1f} measured   peak {each['peak_bytes'] / 2**20:7.1f}"
            f"   {each['seconds']['median'] * 1e3:7.1f} ms, {each['paid']['predicted']:+6.1%} predicted {each['paid']['measured']:+6.1%} measured",
            file=sys.stderr,
        )
    print(
        f"beside computing: {records[-1]['microseconds']:.1f} us per operator that runs again",
        file=sys.stderr,
    )
    return 0


def compare(batch_size: int, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """A record for every setting. paid: seconds of a forward and backward over those of none, less one."""
    batches = [[each] for each in make_data(batch_size * (num_rounds + 1)).tensors[0].split(batch_size)]
    program = capture_module(make_model(), loss, (batches[0], batches[1]))
    of_nodes, rates = costs(program), rates_here("cpu", 1)
    whole = sum(rates.node_seconds(each) for each in of_nodes.values())
    programs = {how: with_recomputation(program, how, costs_of=of_nodes, rates=rates) for how in HOW}
    models = {how: make_model() for how in HOW}
    rounds: dict[str, list[float]] = {how: [] for how in HOW}
    for number, batch in enumerate(batches):
        for how in HOW[:: -1 if number % 2 else 1]:
            seconds = run(programs[how], models[how], batch, num_steps)
            if number:  # the first round warms up
                rounds[how].append(seconds)
        check_alike(models)
    records: list[dict[str, Any]] = []
    for how in HOW:
        predicted = recomputed(program, of_nodes, how, rates)
        memory = measure_memory(job_of(programs[how]), batches[:1])
        paid = (
            statistics.median(mine / plain for mine, plain in zip(rounds[how], rounds["none"], strict=True))
            - 1
        )
        times = rounds[how]
        records.append(
            {
                "recompute": how,
                "batch": batch_size,
                # the loss is no activation
                "kept_bytes": {"predicted": predicted.kept_bytes, "measured": memory.kept - 4},
                "peak_bytes": memory.peaks["backward"] - memory.parameters,
                "paid": {"predicted": predicted.seconds / whole, "measured": paid},
                "seconds": {"median": statistics.median(times), "minimum": min(times), "maximum": max(times)},
            }
        )
    return records


def run(program: Program, model: nn.Module, batch: list[Tensor], num_steps: int) -> float:
    """Seconds of a forward and backward."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    model.zero_grad()
    started = time.perf_counter()
    for _ in range(num_steps):
        run_program(program, parameters, buffers, batch).backward()
    return (time.perf_counter() - started) / num_steps


def check_alike(models: dict[str, nn.Module]) -> None:
    """Raise unless all gradients are the same bits."""
    for how in HOW[1:]:
        for one, other in zip(models["none"].parameters(), models[how].parameters(), strict=True):
            if (one.grad is None) != (other.grad is None) or (
                one.grad is not None and other.grad is not None and not torch.equal(one.grad, other.grad)
            ):
                raise SystemExit(f"Gradients under recompute={how} differ.")


def job_of(program: Program) -> Job:
    """A job whose loss is the program."""
    base = Job(model=make_model, loss=loss, optimizer=make_optimizer, data=lambda: [0], batch_size=1, steps=1)
    return replace(
        base,
        loss=lambda model, chunk: run_program(
            program, dict(model.named_parameters()), dict(model.named_buffers()), chunk
        ),
    )


def overhead(num_rounds: int) -> dict[str, Any]:
    """What running again takes per operator besides the operator itself, of a chain of operators on eight
    numbers."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(100):
                x = (x * self.scale).tanh()
            return x.sum()

    program = capture_module(Chain(), lambda model, batch: model(batch), (torch.zeros(8), torch.ones(8)))
    model, x = Chain(), torch.zeros(8)
    parameters = dict(model.named_parameters())
    again = with_recomputation(program, "full")

    def least(action: Callable[[], Any]) -> float:
        times: list[float] = []
        for _ in range(10 * num_rounds):
            started = time.perf_counter()
            action()
            times.append(time.perf_counter() - started)
        return min(times)

    forward = least(lambda: run_program(program, parameters, {}, x))
    plain = least(lambda: run_program(program, parameters, {}, x).backward())
    paid = least(lambda: run_program(again, parameters, {}, x).backward())
    number = len(recomputed(program, costs(program), "full").seconds_of)
    return {
        "operators": number,
        "microseconds": (paid - plain - forward * number / len(program.nodes)) / number * 1e6,
        "forward": forward / len(program.nodes) * 1e6,
    }


if __name__ == "__main__":
    sys.exit(main())
