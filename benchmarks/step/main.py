"""Seconds per training step of the benchmark GPT on two CPU ranks: meshloom and its peers side by side, the peers over Gloo.

    python benchmarks/step/main.py --mode dp --json -        # data parallel, against DDP and FSDP2, and one rank alone with half of the batch
    python benchmarks/step/main.py --mode tp --json -        # tensor parallel, against DTensor's parallelize_module
    python benchmarks/step/main.py --mode pp --json -        # pipeline, 1F1B with 4 microbatches, against torch.distributed.pipelining

One pair of processes with one thread each hosts all systems, so that they meet the same machine. They are timed in
turns: a round is a few steps of each, and the order of the systems is reversed from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dtensor import wrap_dtensor
from gpt import loss, make_data, make_fused_optimizer, make_model, make_optimizer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import meshloom as ml

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))
from pipelining import open_pipelining

RANKS = 2
HALF = ("half alone", "half")  # no peer, but what any data parallel step has to take at least
PLANS = {"dp": f"dp={RANKS}", "tp": f"tp={RANKS}", "pp": f"pp={RANKS},microbatches=4"}
BASE = {
    "dp": ("torch ddp", "ddp"),
    "tp": ("torch dtensor", "dtensor"),
    "pp": ("torch pipelining", "pipelining"),
}  # mode -> the peer that ratios are taken to
Step = Callable[[], float]  # one step; the loss of the whole batch (meshloom) or of this rank's share (the others)
MakeOptimizer = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
Prepare = Callable[[], Step]  # read the next batch, which is not timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write one record per line to FILE; - is standard output")
    parser.add_argument("--mode", choices=list(BASE), default="dp", help="how meshloom divides a step, and which peers it meets")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) in all systems, instead of its defaults")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16], help="global batch sizes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each system in a round")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "records.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--log-dir", directory]
        words = [*sys.argv[1:], "--json", str(output)]
        code = subprocess.run([*launch, "--nproc-per-node", str(RANKS), __file__, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
        if code:
            return code
        records = [json.loads(line) for line in output.read_text().splitlines()]
    report(records, arguments.json, BASE[arguments.mode][1])
    return 0


def report(records: list[dict[str, Any]], target: str | None, base: str) -> None:
    """Records as JSON lines to `target`, and the ratios to standard error."""
    lines = "".join(json.dumps({key: value for key, value in record.items() if key != "rounds"}) + "\n" for record in records)
    if target == "-":
        sys.stdout.write(lines)
    elif target:
        Path(target).write_text(lines)
    for record in records:
        peer = next(other for other in records if other["mode"] == base and other["batch"] == record["batch"])
        paired = statistics.median(own / theirs for own, theirs in zip(record["rounds"], peer["rounds"], strict=True))
        ratio = record["seconds"]["median"] / peer["seconds"]["median"]
        seconds = record["seconds"]
        print(
            f"batch {record['batch']:3}  {record['system']:<13} {seconds['median'] * 1e3:8.1f} ms"
            f" ({seconds['minimum'] * 1e3:.1f} to {seconds['maximum'] * 1e3:.1f})   {ratio:.3f} ({paired:.3f}) of {base}",
            file=sys.stderr,
        )


def run_rank(arguments: argparse.Namespace) -> None:
    """On each of the ranks: time all systems at all batch sizes; rank 0 writes the records."""
    torch.set_num_threads(1)
    with Path(arguments.json if os.environ["RANK"] == "0" else os.devnull).open("w") as file:
        for batch_size in arguments.batches:
            optimizer = make_fused_optimizer if arguments.fused else make_optimizer
            rounds = time_systems(arguments.mode, optimizer, batch_size, arguments.rounds, arguments.steps)
            for (system, mode), seconds in rounds.items():
                summary = {"median": statistics.median(seconds), "minimum": min(seconds), "maximum": max(seconds)}
                record = {"system": system, "mode": mode, "ranks": RANKS, "batch": batch_size, "seconds": summary, "rounds": seconds}
                file.write(json.dumps(record) + "\n")
                file.flush()


def time_systems(mode: str, optimizer: MakeOptimizer, batch_size: int, num_rounds: int, num_steps: int) -> dict[tuple[str, str], list[float]]:
    """Seconds per step of each system in each round."""
    total_steps = (num_rounds + 1) * num_steps  # the first round warms up
    with ExitStack() as stack:
        # meshloom goes first: it joins the ranks that torchrun started, and the peers use what is there.
        prepare: dict[tuple[str, str], Prepare] = {("meshloom", mode): open_meshloom(PLANS[mode], optimizer, batch_size, total_steps, stack)}
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        if mode == "dp":
            prepare["torch ddp", "ddp"] = open_peer(wrap_ddp, optimizer, shares(batch_size, total_steps))
            prepare["torch fsdp2", "fsdp2"] = open_peer(wrap_fsdp2, optimizer, shares(batch_size, total_steps))
            prepare[HALF] = open_peer(lambda model: model, optimizer, shares(batch_size, total_steps)) if dist.get_rank() == 0 else lambda: float
        elif mode == "pp":
            prepare["torch pipelining", "pipelining"] = open_pipeline(optimizer, batch_size, total_steps)
        else:
            batches = make_data(batch_size * total_steps).tensors[0].split(batch_size)
            prepare["torch dtensor", "dtensor"] = open_peer(wrap_dtensor, optimizer, ([each] for each in batches), around=loss_parallel)
        seconds: dict[tuple[str, str], list[float]] = {system: [] for system in prepare}
        for number in range(num_rounds + 1):
            losses = {}
            for system in list(prepare)[:: -1 if number % 2 else 1]:
                duration, losses[system] = time_round(prepare[system], num_steps)
                if number:
                    seconds[system].append(duration)
            if number == 0:
                check_equal(losses, BASE[mode])
    assert torch.get_num_threads() == 1, "a system changed the number of threads"
    return seconds


def time_round(prepare: Prepare, num_steps: int) -> tuple[float, float]:
    """Seconds per step of the slowest rank, and the first loss averaged over the ranks."""
    duration, losses = 0.0, []
    for _ in range(num_steps):
        step = prepare()
        dist.barrier()
        started = time.perf_counter()
        losses.append(step())
        duration += time.perf_counter() - started
    slowest, first = torch.tensor(duration / num_steps), torch.tensor(losses[0])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(first)
    return slowest.item(), first.item() / RANKS


def check_equal(losses: dict[tuple[str, str], float], base: tuple[str, str]) -> None:
    """All systems start from the same parameters and samples, so the first loss is the same up to rounding."""
    for system, value in losses.items():
        if system == HALF:
            continue  # the other half's loss is not there
        torch.testing.assert_close(value, losses[base], rtol=1e-5, atol=0.0, msg=lambda text, system=system: f"{system}: {text}")


def open_meshloom(plan: str, optimizer: MakeOptimizer, batch_size: int, num_steps: int, stack: ExitStack) -> Prepare:
    """The job as its documentation says, stepped by hand."""
    job = ml.Job(
        model=make_model,
        loss=loss,
        optimizer=optimizer,
        data=lambda: make_data(batch_size * num_steps),
        batch_size=batch_size,
        steps=num_steps,
        shuffle=False,
    )
    trainer = stack.enter_context(ml.Trainer(job, plan, devices="cpu", share=True))  # as `meshloom train` does
    batches = trainer.batches()
    stack.callback(batches.close)

    def prepare() -> Step:
        batch = next(batches)
        return lambda: trainer.step(batch)

    return prepare


def open_peer(
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
    make_optimizer: MakeOptimizer,
    batches: Iterator[list[Tensor]],
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Prepare:
    """The usual loop around a wrapped model; around: what forward and backward run in."""
    model = wrap(make_model())
    optimizer = make_optimizer(list(model.named_parameters()))

    def step(batch: list[Tensor]) -> float:
        optimizer.zero_grad()
        with around():
            value = loss(model, batch)
            value.backward()
        optimizer.step()
        return value.item()

    def prepare() -> Step:
        batch = next(batches)
        return lambda: step(batch)

    return prepare


def open_pipeline(optimizer: MakeOptimizer, batch_size: int, num_steps: int) -> Prepare:
    """The peer's 1F1B. One rank knows the loss, so that it counts for all."""
    step = open_pipelining("1f1b", 4, optimizer)
    batches = iter(make_data(batch_size * num_steps).tensors[0].split(batch_size))

    def prepare() -> Step:
        tokens = next(batches)
        return lambda: RANKS * step(tokens)

    return prepare


def wrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """DDP, with the option that its documentation names for saving a copy of the gradients."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrap_fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    """FSDP2: every block, then the rest."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shares(batch_size: int, num_steps: int) -> Iterator[list[Tensor]]:
    """This rank's contiguous share of every batch."""
    data = make_data(batch_size * num_steps).tensors[0]
    for whole in data.split(batch_size):
        yield [whole.chunk(RANKS)[dist.get_rank()]]


if __name__ == "__main__":
    sys.exit(main())
