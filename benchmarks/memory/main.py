"""Bytes of parameters and optimizer state on each rank of the benchmark GPT, at the start and while training,
beside one device's.

    python benchmarks/memory/main.py --json -

Every rank is a process. All that torch allocates in it is followed from before the model is built
(torch.profiler's memory events), so the peak of the start counts whatever is alive together: the whole model,
its parts, and what reading the loss takes.

Memory that several ranks have mapped is counted as the kernel does (Pss in /proc/self/smaps): a page that n
of them use is 1/n of a page for each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import TensorDataset

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
from gpt import loss, make_data, make_model, make_optimizer
from launched import torchrun
from records import write_records

import meshloom as ml
from meshloom.replica.replica_state import check_identical

OPENED = "meshloom: the trainer is open"
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per rank to FILE; - is standard output"
    )
    parser.add_argument("--plans", nargs="+", default=["dp=1", "tp=2", "dp=2", "dp=4"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--length",
        type=int,
        default=16,
        help="tokens of a sample; few, so that what is counted is not activations",
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.plans[0], arguments.batch, arguments.length, Path(arguments.json))
        return 0
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for plan in arguments.plans:
            words = [
                "--plans",
                plan,
                "--batch",
                str(arguments.batch),
                "--length",
                str(arguments.length),
                "--json",
                directory,
            ]
            size = ml.Plan.parse(plan).mesh.size
            code = subprocess.run(
                [*torchrun(size, directory), __file__, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", "MESHLOOM_KEEP_RANKS": "1"},
            ).returncode
            if code:
                return code
            records += [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(size)]
    write_records(records, arguments.json)
    base = records[0]["steady"]
    for record in records:
        print(
            f"{record['plan']:<6} rank {record['rank']}: parameters and optimizer state {record['steady'] / MIB:6.1f} MiB ({record['steady'] / base:.3f}), "
            f"peak at the start {record['start'] / MIB:6.1f} MiB ({record['start'] / base:.3f})",
            file=sys.stderr,
        )
    for plan in arguments.plans:
        together = sum(record["steady"] for record in records if record["plan"] == plan)
        print(
            f"{plan:<6} all ranks: parameters and optimizer state {together / MIB:6.1f} MiB ({together / base:.3f})",
            file=sys.stderr,
        )
    return 0


def measure(plan: str, batch_size: int, length: int, directory: Path) -> None:
    """On a rank: open a trainer and take two steps."""
    torch.set_num_threads(1)
    made: list[torch.optim.Optimizer] = []

    def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made.append(make_optimizer(named))
        return made[-1]

    def data() -> TensorDataset:
        (tokens,) = make_data(2 * batch_size).tensors
        return TensorDataset(tokens[:, : length + 1])

    job = ml.Job(
        model=make_model,
        loss=loss,
        optimizer=optimizer,
        data=data,
        batch_size=batch_size,
        steps=2,
        shuffle=False,
    )
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
        ml.Trainer(job, plan, devices="cpu", share=True, cache="off") as trainer,
    ):
        with record_function(OPENED):
            rank = trainer.replicas[0].context.rank
        for batch in trainer.batches():
            trainer.step(batch)
        steady = held([*trainer.replicas[0].model.parameters(), *state_of(made[-1])])
        # nobody lets go of memory before all have counted
        trainer.together(lambda replica: check_identical(replica, 1))
    record = {
        "plan": plan,
        "rank": rank,
        "batch": batch_size,
        "length": length,
        "start": peak_until(seen, OPENED),
        "steady": steady,
    }
    (directory / f"{rank}.json").write_text(json.dumps(record))


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory, each counted once, and this process's share of what it has in common with
    others."""
    sizes = {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}
    total = 0
    for start, stop, proportional in common_mappings():
        inside = [address for address in sizes if start <= address < stop]
        total += proportional if inside else 0
        for address in inside:
            del sizes[address]
    return total + sum(sizes.values())


def common_mappings() -> list[tuple[int, int, int]]:
    """Start, end and Pss in bytes of every mapping of memory that processes share."""
    found: list[tuple[int, int, int]] = []
    common = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start, stop = (int(word, 16) for word in words[0].split("-"))
            common = words[1].endswith("s")
        elif words[0] == "Pss:" and common:
            found.append((start, stop, int(words[1]) * 1024))
    return found


def peak_until(seen: Any, mark: str) -> int:
    """Most bytes that were allocated at a time before the event `mark`."""
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    alive, most = 0, 0
    for event in events:
        if event.name() == mark:
            break
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


if __name__ == "__main__":
    sys.exit(main())
