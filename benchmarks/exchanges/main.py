"""What each way to agree sends and what it does to the loss: two examples under every exchange, from the same
seeds.

Four replicas in one process, in lockstep, so that every run repeats; nothing here is about seconds.

    python benchmarks/exchanges/main.py digits --seeds 3
    python benchmarks/exchanges/main.py gpt
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshloom.core.job import Job
from meshloom.replica.expected_bytes import expected_bytes
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANS = [
    "dp=4",
    "dp=4,exchange=server",
    "dp=4,exchange=server,servers=3",
    "dp=4,exchange=local_sgd",
    "dp=4,exchange=local_sgd,local_steps=8",
    "dp=4,exchange=diloco,local_steps=8",
    "dp=4,exchange=diloco,local_steps=8,outer_momentum=0.5",
    "dp=4,compress=bf16",
    "dp=4,compress=powersgd:4",
    "dp=4,compress=powersgd:1",
    "dp=4,compress=topk:0.1",
    "dp=4,compress=topk:0.01",
]
LAST = 20  # steps whose losses are averaged


def example(name: str) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_of(kind: str) -> Job:
    """The digits as they are; the GPT with two blocks of width 64."""
    if kind == "digits":
        return example("02_digits").job
    module = example("01_gpt_bytes")
    return replace(module.job, model=lambda: module.GPT(width=64, blocks=2), batch_size=32)


def run(job: Job, plan: str) -> tuple[float, float, float]:
    """Mean loss of the last steps, the first metric on held-out data, bytes per step that a rank hands in
    along dp."""
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        losses = [trainer.step(batch) for batch in trainer.batches()]
        sent = trainer.summary(0.0, {}, None)
        assert sent.predicted == sent.counted
        start = expected_bytes(trainer.replicas[0]).once
        num_bytes = sent.counted.total("dp") - start.total("dp")
        metric = next(iter(trainer.evaluate().values()))
    return statistics.mean(losses[-LAST:]), metric, num_bytes / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["digits", "gpt"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = job_of(arguments.kind)
    job = replace(job, steps=arguments.steps or job.steps)
    print(f"{arguments.kind}, {job.steps} steps, batches of {job.batch_size}, {arguments.seeds} seed(s)")
    print("| plan | bytes per step | to dp=4 | loss, last 20 steps | held out |\n|---|---|---|---|---|")
    first = 0.0
    for plan in PLANS:
        found = [run(replace(job, seed=seed), plan) for seed in range(arguments.seeds)]
        num_bytes = found[0][2]
        first = first or num_bytes
        losses, metrics = ([each[column] for each in found] for column in (0, 1))
        print(
            f"| `{plan}` | {num_bytes:,.0f} | {num_bytes / first:.3f} | {_range(losses)} | {_range(metrics)} |",
            flush=True,
        )


def _range(values: list[float]) -> str:
    spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


if __name__ == "__main__":
    main()
