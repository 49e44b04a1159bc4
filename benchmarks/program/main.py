"""Seconds per training step of the benchmark GPT on one device: its program next to the module it was read
from.

    python benchmarks/program/main.py --json -

Both run in one process of one thread, in turns: a round is a few steps of each, and the order is reversed
from round to round. They have parameters of their own, start alike, and read the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
from gpt import loss, make_data, make_model, make_optimizer
from records import write_records

from meshloom.program.capture.capture import capture_module
from meshloom.program.run.execute import run_program

Forward = Callable[[list[Tensor]], Tensor]  # a batch -> its loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of each in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = [
        record for size in arguments.batches for record in time_both(size, arguments.rounds, arguments.steps)
    ]
    write_records(
        ({key: value for key, value in record.items() if key != "rounds"} for record in records),
        arguments.json,
    )
    for eager, program in zip(records[::2], records[1::2], strict=True):
        ratio = program["seconds"]["median"] / eager["seconds"]["median"]
        pairs = statistics.median(
            mine / theirs for mine, theirs in zip(program["rounds"], eager["rounds"], strict=True)
        )
        print(
            f"batch {eager['batch']:3}  {eager['part']:<16}  eager {eager['seconds']['median'] * 1e3:7.1f} ms"
            f"  program {program['seconds']['median'] * 1e3:7.1f} ms   ratio {ratio:.3f} (per round {pairs:.3f})",
            file=sys.stderr,
        )
    return 0


def time_both(batch_size: int, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Records of eager and program, for the whole step and for its forward and backward."""
    batches = [
        [each] for each in make_data(batch_size * num_steps * (num_rounds + 1)).tensors[0].split(batch_size)
    ]
    module, owner = make_model(), make_model()
    program = capture_module(make_model(), loss, (batches[0], batches[1]))
    parameters, buffers = dict(owner.named_parameters()), dict(owner.named_buffers())
    systems = {
        "eager": Stepper(module, lambda batch: loss(module, batch)),
        "program": Stepper(owner, lambda batch: run_program(program, parameters, buffers, batch)),
    }
    seconds: dict[tuple[str, str], list[float]] = {
        (part, name): [] for part in ("step", "forward+backward") for name in systems
    }
    for number in range(num_rounds + 1):
        share = batches[number * num_steps : (number + 1) * num_steps]
        losses: dict[str, float] = {}
        for name in list(systems)[:: -1 if number % 2 else 1]:
            losses[name], whole, graded = systems[name].run(share)
            if number:  # the first round warms up
                seconds["step", name].append(whole)
                seconds["forward+backward", name].append(graded)
        torch.testing.assert_close(losses["program"], losses["eager"], rtol=1e-5, atol=0.0)
    return [
        {
            "part": part, "system": name, "batch": batch_size, "rounds": times,
            "seconds": {"median": statistics.median(times), "minimum": min(times), "maximum": max(times)},
        }
        for (part, name), times in seconds.items()
    ]  # fmt: skip


class Stepper:
    """Training steps of one of the two."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        self._forward = forward
        self._optimizer = make_optimizer(list(model.named_parameters()))

    def run(self, batches: list[list[Tensor]]) -> tuple[float, float, float]:
        """The last loss, and the seconds per step: of all of it, and of its forward and backward."""
        value = torch.tensor(0.0)
        graded = 0.0
        started = time.perf_counter()
        for batch in batches:
            self._optimizer.zero_grad()
            before = time.perf_counter()
            value = self._forward(batch)
            value.backward()
            graded += time.perf_counter() - before
            self._optimizer.step()
        return value.item(), (time.perf_counter() - started) / len(batches), graded / len(batches)


if __name__ == "__main__":
    sys.exit(main())
