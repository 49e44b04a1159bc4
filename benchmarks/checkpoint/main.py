"""Seconds for which training stands still at a checkpoint: in the foreground, in the background, and with
`torch.distributed.checkpoint.async_save`.

    python benchmarks/checkpoint/main.py --json -
    python benchmarks/checkpoint/main.py --gigabytes 6.4 --json -

Two ranks on CPUs train a stack of linear layers with AdamW: three numbers of four bytes for each parameter. One
start of them is for meshloom, which saves in the foreground and in the background in turns, the next for FSDP2 over
Gloo, which saves with `async_save` as its documentation says; starts take turns, too, so that all meet the same
machine, and only one has the state in memory.

A save stands still from its call until the next step may begin. Steps follow until the checkpoint is whole; what
they take longer than the steps before the save is recorded beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

sys.path += [str(Path(__file__).parents[1])]
from launched import launched
from records import write_records

import meshloom as ml

RANKS = 2
WIDTH = 1024
SAMPLES = 8
BYTES = 12  # of a parameter: itself, and AdamW's two averages
FOREGROUND, BACKGROUND, PEER = "meshloom, foreground", "meshloom, background", "torch async_save"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per save to FILE; - is standard output"
    )
    parser.add_argument("--gigabytes", type=float, default=0.2, help="of a checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each system")
    parser.add_argument(
        "--saves", type=int, default=2, help="of each kind in a start, after one that is not counted"
    )
    parser.add_argument("--plan", default=f"dp={RANKS}", help="of meshloom")
    parser.add_argument("--directory", help="where to save; default: where temporary files are")
    parser.add_argument("--system", choices=["meshloom", "torch"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        records = list((ours if arguments.system == "meshloom" else theirs)(arguments))
        if os.environ["RANK"] == "0":
            write_records(records, arguments.json)
        return 0
    found: list[dict[str, Any]] = []
    words = [
        "--gigabytes",
        str(arguments.gigabytes),
        "--saves",
        str(arguments.saves),
        "--plan",
        arguments.plan,
    ]
    for number in range(arguments.rounds):
        for system in ("meshloom", "torch")[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                given = [*words, "--system", system, "--directory", directory]
                new = [{**each, "round": number} for each in launched(__file__, RANKS, given)]
            found += new
            # what was measured stays if a later start is cut off
            write_records(new if arguments.json == "-" else found, arguments.json)
    for line in summary(found):
        print(line, file=sys.stderr)
    return 0


def summary(found: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each kind of save, with the ratio of medians to the foreground's."""
    of_kind = {
        kind: [each for each in found if each["kind"] == kind and each["number"]]
        for kind in (FOREGROUND, BACKGROUND, PEER)
    }
    base = statistics.median(each["still"] for each in of_kind[FOREGROUND])
    for kind, saves in of_kind.items():
        still = statistics.median(each["still"] for each in saves)
        whole = statistics.median(each["whole"] for each in saves)
        slower = statistics.median(each["slower"] for each in saves)
        first = statistics.median(
            each["still"] for each in found if each["kind"] == kind and not each["number"]
        )
        yield (
            f"{kind:<21} stands still {still:7.3f} s ({still / base:6.1%} of the foreground's), whole after {whole:7.3f} s, steps meanwhile {slower:+7.3f} s; the "
            f"first {first:7.3f} s "
            f"({len(saves)} saves of {saves[0]['gigabytes']:g} GB)"
        )


@dataclass(frozen=True)
class Training:
    """A system that trains. step: one step. save: a save of a kind, until training may go on. whole: whether that
    checkpoint is whole. remove: it, before the next."""

    step: Callable[[], None]
    save: Callable[[str], None]
    whole: Callable[[], bool]
    remove: Callable[[], None]


def measure(training: Training, kinds: list[str], saves: int, gigabytes: float) -> Iterator[dict[str, Any]]:
    """The records of saves of these kinds, in turns. The first of each, number 0, fills new memory."""
    for _ in range(2):
        training.step()
    for number in range(saves + 1):
        for kind in kinds:
            before = statistics.median(seconds(training.step) for _ in range(3))
            began = time.perf_counter()
            still = seconds(lambda: training.save(kind))  # noqa: B023
            steps: list[float] = []
            whole = still
            while not training.whole():
                steps.append(seconds(training.step))
                whole = time.perf_counter() - began
            training.remove()
            yield {
                "kind": kind,
                "gigabytes": gigabytes,
                "number": number,
                "still": still,
                "whole": whole,
                "step": before,
                "steps": len(steps),
                "slower": sum(steps) - len(steps) * before,
            }


def seconds(act: Callable[[], Any]) -> float:
    """What `act` takes, from when all ranks begin until this one is done."""
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def ours(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """On a rank."""
    torch.set_num_threads(1)
    out = Path(arguments.directory)
    job = ml.Job(
        model=lambda: make_model(arguments.gigabytes), loss=lambda model, batch: loss(model, *batch), optimizer=make_optimizer,
        data=make_data, batch_size=SAMPLES, steps=100_000, checkpoint="background", keep_checkpoints=1,
    )  # fmt: skip
    with ml.Trainer(job, arguments.plan, devices="cpu", out=out, share=True, cache="off") as trainer:
        if not dist.is_initialized():
            raise SystemExit("This benchmark is of ranks that torchrun has started.")
        batches = trainer.batches()
        saved: list[Path] = []
        training = Training(
            step=lambda: void(trainer.step(next(batches))),
            save=lambda kind: saved.append(trainer.save(wait=kind == FOREGROUND)),
            whole=lambda: agreed(saved[-1].is_dir()),
            remove=lambda: None,  # the next save does
        )
        yield from measure(training, [FOREGROUND, BACKGROUND], arguments.saves, arguments.gigabytes)


def theirs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """On a rank: FSDP2, whose ranks hold a half each, and `async_save` of what `get_state_dict` returns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    model = make_model(arguments.gigabytes)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(list(model.named_parameters()))
    inputs, targets = make_data().tensors
    share = slice(dist.get_rank() * SAMPLES // RANKS, (dist.get_rank() + 1) * SAMPLES // RANKS)
    saving: list[Any] = []
    of_saving: Any = dist.new_group(backend="gloo")  # its thread must not use the group of training

    def step() -> None:
        loss(model, inputs[share], targets[share]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(_: str) -> None:
        weights, state = get_state_dict(model, optimizer)
        state_dict = {"model": weights, "optimizer": state}
        saving.append(dcp.async_save(state_dict, checkpoint_id=path(), process_group=of_saving))

    def path() -> Path:
        return Path(arguments.directory, str(len(saving)))

    def whole() -> bool:
        return agreed(saving[-1].done())

    def remove() -> None:
        saving[-1].result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(arguments.directory, str(len(saving) - 1)))

    try:
        yield from measure(Training(step, save, whole, remove), [PEER], arguments.saves, arguments.gigabytes)
    finally:
        dist.destroy_process_group()


def agreed(here: bool) -> bool:
    """Whether it is so on all ranks."""
    count = torch.tensor(int(here))
    dist.all_reduce(count)
    return int(count) == RANKS


def void(_: object) -> None:
    """Nothing."""


def make_model(gigabytes: float) -> nn.Sequential:
    """Linear layers with so many gigabytes of parameters and state."""
    layers = max(round(gigabytes * 1e9 / (BYTES * WIDTH * WIDTH)), 1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for _, each in named], lr=1e-4)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2)))


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return ((model(inputs) - targets) ** 2).mean()


if __name__ == "__main__":
    sys.exit(main())
