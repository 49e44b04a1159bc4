"""Milliseconds per training step, and of CPU time of it, of compiled plans on two CPU ranks, beside the same plans uncompiled, DDP with
`torch.compile`, and a plain loop with `torch.compile`.

    python benchmarks/compile/main.py --json -                           # the benchmark GPT, an MLP of many small operators, a convolutional network; dp=2
    python benchmarks/compile/main.py --plans dp=2 tp=2 --models gpt --json -
    python benchmarks/compile/main.py --borders --json -                 # what a border between two compiled regions costs

CPU time is that of the slower rank's process in its least step, so that other work on the machine hardly counts in it.

One pair of processes with one thread each hosts all systems. They are timed in turns, a round is a few steps of each,
and the order is reversed from round to round. The first round compiles. The plain loop is one rank with half of the
batch, while the other waits: what any division of the batch over two ranks has to take at least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import meshloom as ml

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
import gpt
from launched import launched
from records import write_records
from rounds import Prepare, Step, end_rounds, time_round

RANKS = 2
_compile: Any = torch.compile


class SmallOperators(nn.Module):
    """An MLP of narrow layers with several elementwise operators between them, [batch, 64] -> [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(24))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = layer(norm(x))
            x = x + 0.5 * y * torch.sigmoid(1.7 * y) + 0.1 * torch.tanh(y)
        return self.head(x)


class Convolutions(nn.Module):
    """Residual blocks of convolutions with batch norm, [batch, 3, 32, 32] -> [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(8))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.silu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


def class_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled(num_samples: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(10, (num_samples,), generator=generator))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its loss, its data of so many samples, and the global batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    data: Callable[[int], TensorDataset]
    batch: int

    def model(self) -> nn.Module:
        """The same initial parameters at every call."""
        torch.manual_seed(0)
        return self.build()


CASES = {
    "gpt": Case(build=gpt.GPT, loss=gpt.loss, data=gpt.make_data, batch=4),
    "small_operators": Case(
        build=SmallOperators, loss=class_loss, data=lambda count: labelled(count, 64), batch=128
    ),
    "convolutions": Case(
        build=Convolutions, loss=class_loss, data=lambda count: labelled(count, 3, 32, 32), batch=32
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--plans", nargs="+", default=["dp=2"], help="on two ranks, each uncompiled and compiled"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each system in a round")
    parser.add_argument(
        "--borders", action="store_true", help="instead: one compiled function against eight in a row"
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    if arguments.borders:
        torch.set_num_threads(1)
        records = [measure_borders(arguments.rounds)]
        print(f"a border, forward and backward: {records[0]['border_us']:.1f} us", file=sys.stderr)
    else:
        records = launched(__file__, RANKS, sys.argv[1:])
        tell(records)
    write_records(
        ({key: value for key, value in record.items() if key != "rounds"} for record in records),
        arguments.json,
    )
    return 0


def tell(records: list[dict[str, Any]]) -> None:
    """Ratios of medians to standard error."""
    median = {(each["model"], each["system"]): each["seconds"]["median"] for each in records}
    cpu = {(each["model"], each["system"]): each["cpu_seconds"] for each in records}
    for record in records:
        model, system, seconds = record["model"], record["system"], record["seconds"]
        ratios = ""
        if system.endswith(",compile=true"):
            others = (system.removesuffix(",compile=true"), "ddp compiled", "plain compiled, half")
            ratios = "  " + ", ".join(
                f"/ {each}: {seconds['median'] / median[model, each]:.2f} (CPU {cpu[model, system] / cpu[model, each]:.2f})"
                for each in others
            )
        spread = f"({seconds['minimum'] * 1e3:.1f} to {seconds['maximum'] * 1e3:.1f}), CPU {cpu[model, system] * 1e3:5.1f} ms"
        print(
            f"{model:<16} {system:<22} {seconds['median'] * 1e3:8.1f} ms {spread}{ratios}",
            file=sys.stderr,
        )


def run_rank(arguments: argparse.Namespace) -> None:
    """On each of the ranks: time all systems on all models; rank 0 writes the records."""
    torch.set_num_threads(1)
    with Path(arguments.json if os.environ["RANK"] == "0" else os.devnull).open("w") as file:
        for model in arguments.models:
            timed = time_systems(CASES[model], arguments.plans, arguments.rounds, arguments.steps)
            for system, (seconds, cpu_seconds, compiled) in timed.items():
                summary = {
                    "median": statistics.median(seconds), "minimum": min(seconds), "maximum": max(seconds)
                }  # fmt: skip
                record = {
                    "model": model,
                    "system": system,
                    "ranks": RANKS,
                    "batch": CASES[model].batch,
                    "cpu_seconds": cpu_seconds,
                }
                file.write(
                    json.dumps({**record, "seconds": summary, "compiled": compiled, "rounds": seconds}) + "\n"
                )
                file.flush()


def time_systems(
    case: Case, plans: list[str], num_rounds: int, num_steps: int
) -> dict[str, tuple[list[float], float, str | None]]:
    """Seconds per step of each system in each round, the least of CPU time, and what it says of its compilation."""
    total = (num_rounds + 1) * num_steps
    with ExitStack() as stack:
        prepare: dict[str, Prepare] = {}
        trainers: dict[str, ml.Trainer] = {}
        for plan in plans:
            for text in (plan, f"{plan},compile=true"):
                trainers[text], prepare[text] = open_meshloom(case, text, total, stack)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        wrap = partial(DistributedDataParallel, gradient_as_bucket_view=True)
        prepare["ddp"] = open_loop(case, wrap(case.model()), total)
        prepare["ddp compiled"] = open_loop(case, _compile(wrap(case.model())), total)
        alone = dist.get_rank() == 0
        prepare["plain compiled, half"] = (
            open_loop(case, _compile(case.model()), total) if alone else lambda: float
        )
        seconds: dict[str, list[float]] = {system: [] for system in prepare}
        spent: dict[str, list[float]] = {system: [] for system in prepare}  # CPU seconds of every step
        prepare = {system: counting(each, spent[system]) for system, each in prepare.items()}
        for number in range(num_rounds + 1):
            losses: dict[str, float] = {}
            for system in list(prepare)[:: -1 if number % 2 else 1]:
                duration, losses[system] = time_round(prepare[system], num_steps)
                if number:
                    seconds[system].append(duration)
            if number == 0:
                for system in prepare:
                    if system != "plain compiled, half":  # the other half's loss is not there
                        torch.testing.assert_close(losses[system], losses["ddp"], rtol=1e-4, atol=0.0)
        said = {
            system: str(compiler.report)
            for system, trainer in trainers.items()
            if (compiler := trainer.replicas[0].engine.stages.compiler)
        }
        slowest = torch.tensor([min(each[num_steps:]) for each in spent.values()])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        cpu = dict(zip(spent, slowest.tolist(), strict=True))
        end_rounds()
    return {system: (each, cpu[system], said.get(system)) for system, each in seconds.items()}


def counting(prepare: Prepare, spent: list[float]) -> Prepare:
    """The same, with the process's CPU seconds of every step in `spent`."""

    def prepared() -> Step:
        step = prepare()

        def counted() -> float:
            started = time.process_time()
            value = step()
            spent.append(time.process_time() - started)
            return value

        return counted

    return prepared


def open_meshloom(case: Case, plan: str, steps: int, stack: ExitStack) -> tuple[ml.Trainer, Prepare]:
    """The job as its documentation says, stepped by hand."""
    job = ml.Job(
        model=case.model, loss=case.loss, optimizer=make_optimizer, data=lambda: case.data(case.batch * steps), batch_size=case.batch, steps=steps,
        shuffle=False,
    )  # fmt: skip
    trainer = stack.enter_context(ml.Trainer(job, plan, devices="cpu", share=True, cache="off"))
    batches = trainer.batches()
    stack.callback(batches.close)

    def prepare() -> Step:
        batch = next(batches)
        return lambda: trainer.step(batch)

    return trainer, prepare


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for _, each in named], lr=1e-3)


def open_loop(case: Case, model: nn.Module, steps: int) -> Prepare:
    """The usual loop, on this rank's contiguous share of every batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()

    def shares() -> Iterator[list[Tensor]]:
        tensors = case.data(case.batch * steps).tensors
        for batch in zip(*(each.split(case.batch) for each in tensors), strict=True):
            yield [each.chunk(RANKS)[dist.get_rank()] for each in batch]

    batches = shares()

    def step(batch: list[Tensor]) -> float:
        optimizer.zero_grad()
        value = case.loss(model, batch)
        value.backward()
        optimizer.step()
        return value.item()

    def prepare() -> Step:
        batch = next(batches)
        return lambda: step(batch)

    return prepare


def measure_borders(num_rounds: int) -> dict[str, Any]:
    """Seconds of forward and backward of eight layers as one compiled function and as eight in a row: a border
    between regions costs an eighth of the difference, with what is not fused across it."""
    torch.manual_seed(0)
    layers = [nn.Linear(384, 384) for _ in range(8)]

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x + F.gelu(F.linear(x, weight, bias))

    def whole(x: Tensor) -> Tensor:
        for each in layers:
            x = layer(x, each.weight, each.bias)
        return x

    one, each_compiled = _compile(whole), _compile(layer)

    def eight(x: Tensor) -> Tensor:
        for each in layers:
            x = each_compiled(x, each.weight, each.bias)
        return x

    rounds: dict[str, list[float]] = {"one": [], "eight": []}
    for number in range(num_rounds + 1):
        for name, run in (("one", one), ("eight", eight)):
            x = torch.randn(16, 384, requires_grad=True)
            started = time.process_time()
            for _ in range(30):
                run(x).sum().backward()
            if number:
                rounds[name].append((time.process_time() - started) / 30)
    least = {name: min(each) for name, each in rounds.items()}
    return {
        "one_seconds": least["one"], "eight_seconds": least["eight"], "border_us": (least["eight"] - least["one"]) / 7 * 1e6, "rounds": rounds,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
