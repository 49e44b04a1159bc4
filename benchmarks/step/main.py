"""Seconds per training step of the benchmark GPT on two CPU ranks: meshloom and its peers side by side, the
peers over Gloo.

    python benchmarks/step/main.py --mode dp --json -        # data parallel, against DDP and FSDP2, and one rank alone with half of the batch; in each mode, too, the
                                                             # peers' loop around ml.parallel
    python benchmarks/step/main.py --mode zero3 --json -     # zero=3 over Gloo, with and without communication during computation, against FSDP2
    python benchmarks/step/main.py --mode tp --json -        # tensor parallel, against DTensor's parallelize_module
    python benchmarks/step/main.py --mode pp --json -        # pipeline, 1F1B with 4 microbatches, against torch.distributed.pipelining
    python benchmarks/step/main.py --size gpt2 --mode tp --batches 2 --rounds 5 --steps 1 --json -     # GPT-2 (124 million), 1,024 tokens
    python benchmarks/step/main.py --against main --json -   # this tree and that revision in turns (paired.py): dp, tp, pp, zero=3, and a small model's CPU time

One pair of processes with one thread each hosts all systems, so that they meet the same machine. They are
timed in turns: a round is a few steps of each, and the order of the systems is reversed from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dtensor import wrap_dtensor
from gpt import GPT, GPT2, SMALL, Size, loss, make_data, make_fused_optimizer, make_model, make_optimizer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import meshloom as ml
from meshloom.loops.ranks import leave_ranks

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "pipeline")]
from launched import launched
from paired import MODES, measure
from pipelining import open_pipelining
from records import write_records
from rounds import Prepare, Step, end_rounds, time_round

RANKS = 2
HALF = ("half alone", "half")  # no peer, but what any data parallel step has to take at least
PLANS = {
    "dp": f"dp={RANKS}",
    "zero3": f"dp={RANKS},zero=3",
    "tp": f"tp={RANKS}",
    "pp": f"pp={RANKS},microbatches=4",
}
NOT_HIDDEN = ("meshloom, overlap=false", "not hidden")  # communication before and after computation
BASE = {
    "dp": ("torch ddp", "ddp"),
    "zero3": ("torch fsdp2", "fsdp2"),
    "tp": ("torch dtensor", "dtensor"),
    "pp": ("torch pipelining", "pipelining"),
}  # mode -> the peer that ratios are taken to
SIZES = {"small": SMALL, "gpt2": GPT2}
MakeOptimizer = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument(
        "--mode",
        choices=list(MODES),
        help="how meshloom divides a step, and which peers it meets (default: dp; with --against all, of which small is there alone)",
    )
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="small",
        help="of the model: 12 million parameters, 128 tokens; or 124 million, 1,024 tokens",
    )
    parser.add_argument(
        "--base-only",
        action="store_true",
        help="meshloom and the peer that ratios are taken to, and no other",
    )
    parser.add_argument(
        "--fused", action="store_true", help="AdamW(fused=True) in all systems, instead of its defaults"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16], help="global batch sizes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each system in a round")
    parser.add_argument(
        "--against",
        metavar="REV",
        help="meet meshloom as that revision of this repository has it, in place of peers",
    )
    arguments = parser.parse_args()
    if arguments.against:
        modes = [arguments.mode] if arguments.mode else list(MODES)
        write_records(
            measure(arguments.against, modes, arguments.batches[0], arguments.rounds, arguments.steps),
            arguments.json,
        )
        return 0
    arguments.mode = arguments.mode or "dp"
    if arguments.mode not in BASE:
        parser.error(f"--mode {arguments.mode} has no peer. Use --against REV.")
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    report(launched(__file__, RANKS, sys.argv[1:]), arguments.json, BASE[arguments.mode][1])
    return 0


def report(records: list[dict[str, Any]], target: str | None, base: str) -> None:
    """Records as JSON lines to `target`, and the ratios to standard error."""
    write_records(
        ({key: value for key, value in record.items() if key != "rounds"} for record in records), target
    )
    for record in records:
        peer = next(other for other in records if other["mode"] == base and other["batch"] == record["batch"])
        paired = statistics.median(
            own / theirs for own, theirs in zip(record["rounds"], peer["rounds"], strict=True)
        )
        ratio = record["seconds"]["median"] / peer["seconds"]["median"]
        seconds = record["seconds"]
        print(
            f"batch {record['batch']:3}  {record['system']:<13} {seconds['median'] * 1e3:8.1f} ms"
            f" ({seconds['minimum'] * 1e3:.1f} to {seconds['maximum'] * 1e3:.1f})   {ratio:.3f} ({paired:.3f}) of {base}",
            file=sys.stderr,
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all systems do: so many steps, each on the next batch."""

    size: Size
    make_optimizer: MakeOptimizer
    batch_size: int
    steps: int

    def data(self) -> TensorDataset:
        """All samples, in their order."""
        return make_data(self.batch_size * self.steps, self.size)

    def batches(self) -> Iterator[Tensor]:
        """Tokens [batch, length + 1]."""
        return iter(self.data().tensors[0].split(self.batch_size))


def run_rank(arguments: argparse.Namespace) -> None:
    """On each of the ranks: time all systems at all batch sizes; rank 0 writes the records."""
    torch.set_num_threads(1)
    if arguments.mode == "zero3":  # of the loop of one's own, as of the trainer
        os.environ["MESHLOOM_TRANSPORT"] = "gloo"
    size = SIZES[arguments.size]
    if arguments.mode == "pp":
        size = replace(size, tied=False)  # the peer has no parameters of two stages
    with Path(arguments.json if os.environ["RANK"] == "0" else os.devnull).open("w") as file:
        for batch_size in arguments.batches:
            optimizer = make_fused_optimizer if arguments.fused else make_optimizer
            total = (arguments.rounds + 1) * arguments.steps  # the first round warms up
            training = Training(size=size, make_optimizer=optimizer, batch_size=batch_size, steps=total)
            rounds = time_systems(training, arguments.mode, arguments.rounds, base_only=arguments.base_only)
            for (system, mode), seconds in rounds.items():
                summary = {
                    "median": statistics.median(seconds),
                    "minimum": min(seconds),
                    "maximum": max(seconds),
                }
                record = {
                    "system": system,
                    "mode": mode,
                    "size": arguments.size,
                    "ranks": RANKS,
                    "batch": batch_size,
                }
                file.write(json.dumps({**record, "seconds": summary, "rounds": seconds}) + "\n")
                file.flush()


def time_systems(
    training: Training, mode: str, num_rounds: int, *, base_only: bool
) -> dict[tuple[str, str], list[float]]:
    """Seconds per step of each system in each round."""
    num_steps = training.steps // (num_rounds + 1)
    with ExitStack() as stack:
        # meshloom goes first: it joins the ranks that torchrun started, and the peers use what is there.
        prepare: dict[tuple[str, str], Prepare] = {
            ("meshloom", mode): open_meshloom(PLANS[mode], training, stack)
        }
        if mode == "zero3" and not base_only:
            prepare[NOT_HIDDEN] = open_meshloom(f"{PLANS[mode]},overlap=false", training, stack)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        if not base_only:
            whole = ([each] for each in training.batches())
            stack.callback(partial(leave_ranks, well=True))
            prepare["meshloom parallel", "loop"] = open_peer(
                partial(ml.parallel, plan=PLANS[mode]),
                training,
                shares(training) if "dp" in PLANS[mode] else whole,
            )
        if mode == "dp":
            prepare["torch ddp", "ddp"] = open_peer(wrap_ddp, training, shares(training))
            if not base_only:
                prepare["torch fsdp2", "fsdp2"] = open_peer(wrap_fsdp2, training, shares(training))
                prepare[HALF] = (
                    open_peer(lambda model: model, training, shares(training))
                    if dist.get_rank() == 0
                    else lambda: float
                )
        elif mode == "zero3":
            prepare["torch fsdp2", "fsdp2"] = open_peer(wrap_fsdp2, training, shares(training))
        elif mode == "pp":
            prepare["torch pipelining", "pipelining"] = open_pipeline(training)
        else:
            prepare["torch dtensor", "dtensor"] = open_peer(
                wrap_dtensor, training, ([each] for each in training.batches()), around=loss_parallel
            )
        seconds: dict[tuple[str, str], list[float]] = {system: [] for system in prepare}
        for number in range(num_rounds + 1):
            losses = {}
            for system in list(prepare)[:: -1 if number % 2 else 1]:
                duration, losses[system] = time_round(prepare[system], num_steps)
                if number:
                    seconds[system].append(duration)
            if number == 0:
                check_equal(losses, BASE[mode])
        end_rounds()
    assert torch.get_num_threads() == 1, "a system changed the number of threads"
    return seconds


def check_equal(losses: dict[tuple[str, str], float], base: tuple[str, str]) -> None:
    """All systems start from the same parameters and samples, so the first loss is the same up to
    rounding."""
    for system, value in losses.items():
        if system == HALF:
            continue  # the other half's loss is not there
        torch.testing.assert_close(
            value, losses[base], rtol=1e-5, atol=0.0, msg=lambda text, system=system: f"{system}: {text}"
        )


def open_meshloom(plan: str, training: Training, stack: ExitStack) -> Prepare:
    """The job as its documentation says, stepped by hand."""
    job = ml.Job(
        model=partial(make_model, training.size),
        loss=loss,
        optimizer=training.make_optimizer,
        data=training.data,
        batch_size=training.batch_size,
        steps=training.steps,
        shuffle=False,
    )
    # as `meshloom train` does; zero=3 as over a network, as ranks of one host share one copy anyway
    transport = "gloo" if "zero=3" in plan else "auto"
    trainer = stack.enter_context(
        ml.Trainer(job, plan, devices="cpu", transport=transport, share=True, cache="off")
    )
    batches = trainer.batches()
    stack.callback(batches.close)

    def prepare() -> Step:
        batch = next(batches)
        return lambda: trainer.step(batch)

    return prepare


def open_peer(
    wrap: Callable[[GPT], torch.nn.Module],
    training: Training,
    batches: Iterator[list[Tensor]],
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Prepare:
    """The usual loop around a wrapped model; around: what forward and backward run in."""
    model = wrap(make_model(training.size))
    optimizer = training.make_optimizer(list(model.named_parameters()))

    def step(batch: list[Tensor]) -> float:
        optimizer.zero_grad()
        with around():
            value = loss(model, batch)
            value.backward()
        optimizer.step()
        return value.item()

    def prepare() -> Step:
        batch = next(batches)
        torch.manual_seed(0)  # other systems move it, and a loop of one's own has it alike on all ranks
        return lambda: step(batch)

    return prepare


def open_pipeline(training: Training) -> Prepare:
    """The peer's 1F1B. One rank knows the loss, so that it counts for all."""
    step = open_pipelining("1f1b", 4, training.make_optimizer, training.size)
    batches = training.batches()

    def prepare() -> Step:
        tokens = next(batches)
        return lambda: RANKS * step(tokens)

    return prepare


def wrap_ddp(model: GPT) -> torch.nn.Module:
    """DDP, with the option that its documentation names for saving a copy of the gradients."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrap_fsdp2(model: GPT) -> torch.nn.Module:
    """FSDP2: every block, then the rest."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shares(training: Training) -> Iterator[list[Tensor]]:
    """This rank's contiguous share of every batch."""
    for whole in training.batches():
        yield [whole.chunk(RANKS)[dist.get_rank()]]


if __name__ == "__main__":
    sys.exit(main())
