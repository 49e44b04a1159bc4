"""Python time of a step's own machinery on a CPU, without a device: of a program's run per operator, of hooks and
buckets and of the update per parameter, and of what a step notes and counts: activity, collectives, the loss's sums,
what Python draws.

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
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.recording import RecordedGroup
from meshloom.core.moments.current_step import Moment
from meshloom.core.step_shape import StepShape
from meshloom.data.chunks import Chunk
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.zero import ZeroOne
from meshloom.optimizer.updater import Updater
from meshloom.pipeline.schedules.schedule import Action
from meshloom.program.capture.capture import capture
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.recompute.recompute import with_recomputation
from meshloom.program.run.execute import run_flat
from meshloom.replica.loss_sums import LossSums

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

    is_in_place = True

    def all_reduce(self, *_: Any) -> Nobody:
        return self

    reduce_scatter = all_gather = gather = all_reduce

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
    records = [
        *time_programs(arguments.rounds),
        *time_buckets(arguments.rounds),
        *time_update(arguments.rounds),
        *time_notes(arguments.rounds),
    ]
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
    hooks = [(exchange.hook(each), each) for _, each in named]
    buffers = [torch.zeros(4) for _ in named]
    reported, copied = list[float](), list[float]()
    for _ in range(num_rounds):
        exchange.begin(StepShape())
        for _, parameter in named:
            parameter.grad = torch.zeros(4)
        started = time.process_time()
        for hook, parameter in hooks:
            hook(parameter)
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


def time_update(num_rounds: int) -> list[dict[str, Any]]:
    """An update of parameters that this rank owns slices of, beside the optimizer's own step on tensors of their
    sizes."""
    named = [(f"p{number}", nn.Parameter(torch.randn(4))) for number in range(NUM_PARAMETERS)]
    group: Any = Nobody()
    exchange = ZeroOne(named, group, bucket_bytes=25 * 2**20, overlap=False)
    job = ml.Job(
        model=Tiny, loss=mean_square, optimizer=lambda named: torch.optim.SGD([each for _, each in named], 0.1, foreach=True), data=list, batch_size=3,
        steps=1,
    )  # fmt: skip
    updater = Updater(job, named, exchange.ownership)
    bare = [nn.Parameter(each.data()) for each in exchange.ownership.owned]
    alone = torch.optim.SGD(bare, 0.1, foreach=True)
    for each in bare:
        each.grad = torch.zeros_like(each)
    gradients = [torch.zeros_like(each) for each in bare]

    def update() -> None:
        updater.update(gradients, 0.0)

    seconds = [least(update, num_rounds), least(alone.step, num_rounds)]
    return [{
        "what": "an update of owned slices", "slices": len(bare), "us_per_slice": round(seconds[0] / len(bare) * 1e6, 3),
        "own_us_per_slice": round((seconds[0] - seconds[1]) / len(bare) * 1e6, 3),
    }]  # fmt: skip


def time_notes(num_rounds: int) -> list[dict[str, Any]]:
    """What a step does a few times, in microseconds each."""
    activity, actions = Activity(), [Action(0, "F", 0), Action(0, "B", 0)]
    group: Any = Nobody()
    recorded, tensor = RecordedGroup(group, "dp"), torch.zeros(4)
    sums, chunk = LossSums(torch.device("cpu")), Chunk(step=0, batch=8, index=0, samples=4, data=None)
    loss, moment = torch.tensor(1.5, requires_grad=True) * 2, Moment(5, 0)

    def act() -> None:
        activity.follow(actions)
        for action in actions:
            activity.began(action)
            activity.ended(action)

    def add_up() -> None:
        sums.begin()
        sums.add(loss, chunk)
        sums.close()

    def enter() -> None:
        with moment.entered():
            pass

    def several(do: Callable[[], object]) -> Callable[[], object]:
        def done() -> None:
            for _ in range(100):
                do()

        return done

    found = {
        "a phase of a step noted": lambda: activity.enter("chunk", 3, 1),
        "two actions of a pipeline noted": act,
        "a collective counted": lambda: recorded.all_reduce(tensor).wait(),
        "a chunk's loss added up": add_up,
        "a chunk's Python draws seeded": enter,
    }
    return [
        {"what": what, "us": round(least(several(do), num_rounds) / 100 * 1e6, 3)}
        for what, do in found.items()
    ]


def least(do: Callable[[], object], num_rounds: int) -> float:
    """CPU seconds."""
    found = list[float]()
    for _ in range(num_rounds + 2):
        started = time.process_time()
        do()
        found.append(time.process_time() - started)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
