"""The most memory that each rank of a run has in each part of its life, beside FSDP2: start-up, steps, evaluation,
checkpoint, and the same again in a run that resumes.

    python benchmarks/memory/lifetime.py --json -                       # a GPT of 405 million parameters, AdamW
    python benchmarks/memory/lifetime.py --blocks 4 --width 256 --json -   # in a minute

Memory is the kernel's `Pss`: a page that n processes have mapped is 1/n of a page for each. This process reads it
of every rank while they run (`--every` seconds), as the ranks name the part that they are in. What a rank has once
torch and the system under test are imported is recorded as such, and taken away from the rest; `torch._dynamo` is
imported by then, which `torch.optim` does when it makes the first optimizer.

All ranks together are compared with state, predicted activations and the largest unit (a block, the embedding or the
head); the fullest rank, without one unit, with its share of state and activations.

Both systems build without memory: ours as it always does; FSDP2 on the meta device, with `to_empty` and the
model's own initialisation afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
from gpt import GPT, Size, loss, make_data, make_optimizer
from launched import torchrun
from records import write_records

import meshloom as ml
from meshloom.planner.fitting import predicted_ranks
from meshloom.planner.readings import Readings

PEER = "fsdp2"
PLANS = ["dp=2,zero=3", "pp=2", "tp=2", "pp=2,tp=2", "dp=2,tp=2,zero=3"]
GIB = 2**30
IMPORTED, DONE = "imported", "done"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per system to FILE; - is standard output"
    )
    parser.add_argument("--systems", nargs="+", default=[*PLANS, PEER], help=f"plans of meshloom, and {PEER}")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=4, help="samples of a step")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two looks at a rank")
    parser.add_argument("--directory", help="where to save; default: where temporary files are")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = Size(
        vocabulary=50257, width=arguments.width, blocks=arguments.blocks, heads=arguments.width // 64,
        length=arguments.length, tied=False,
    )  # fmt: skip
    if "RANK" in os.environ:
        on_rank(arguments, size)
        return 0
    records = [measured(arguments, size, system) for system in arguments.systems]
    write_records(records, arguments.json)
    for record in records:
        print(*lines_of(record), sep="\n", file=sys.stderr)
    return 0


# --- From outside: what ranks have.


def measured(arguments: argparse.Namespace, size: Size, system: str) -> dict[str, Any]:
    """The record of a system's two runs, the second of which resumes."""
    ranks = 2 if system == PEER else ml.Plan.parse(system).mesh.size
    sizes = [
        "--width",
        arguments.width,
        "--blocks",
        arguments.blocks,
        "--length",
        arguments.length,
        "--batch",
        arguments.batch,
    ]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for resumes in (False, True):
            words = [
                __file__,
                "--systems",
                system,
                *sizes,
                "--directory",
                directory,
                *(["--resume"] if resumes else []),
            ]
            command = [*torchrun(ranks, directory), *map(str, words)]
            for mark in Path(directory).glob("part-*"):
                mark.unlink()
            process = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1", "MESHLOOM_KEEP_RANKS": "1"}
            )
            runs.append(watched(process, Path(directory), ranks, arguments.every))
            if process.wait():
                sys.exit(process.returncode)
    with torch.device("meta"):
        model = GPT(size)
    parameters = sum(each.numel() for each in model.parameters())
    predicted = None
    if system != PEER:
        memories = predicted_ranks(Readings(job_of(size, arguments.batch)), ml.Plan.parse(system))
        predicted = [{**memory.kinds(), **memory.phases} for memory in memories]
    return {
        "system": system, "ranks": ranks, "parameters": parameters, "size": asdict(size), "batch": arguments.batch,
        "state": 16 * parameters, "unit": largest_unit(model), "fresh": runs[0], "resumed": runs[1], "predicted": predicted,
    }  # fmt: skip


def largest_unit(model: GPT) -> int:
    """Bytes of the block, embedding or head that has most parameters."""
    return max(
        sum(each.nbytes for each in unit.parameters()) for unit in (*model.blocks, model.token, model.head)
    )


def watched(process: subprocess.Popen[bytes], directory: Path, ranks: int, every: float) -> dict[str, Any]:
    """Part of a run -> bytes that each rank had at most in it, and most of all ranks at a time."""
    most: dict[str, list[int]] = {}
    together: dict[str, int] = {}
    while process.poll() is None:
        time.sleep(every)
        marks = [directory / f"part-{rank}" for rank in range(ranks)]
        with suppress(OSError, ValueError):
            said = [mark.read_text().split(maxsplit=1) for mark in marks]
            have = [proportional(int(pid)) for pid, _ in said]
            for rank, (part, bytes_) in enumerate(zip([part for _, part in said], have, strict=True)):
                seen = most.setdefault(part, [0] * ranks)
                seen[rank] = max(seen[rank], bytes_)
            for part in {part for _, part in said}:
                together[part] = max(together.get(part, 0), sum(have))
    return {"most": most, "together": together}


def proportional(pid: int) -> int:
    """The `Pss` of a process, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(pid)


def lines_of(record: dict[str, Any]) -> Iterator[str]:
    """Each part's largest rank and sum, in GiB and as shares of the state, without what imports take; both beside
    what they should be at most."""
    state, ranks = record["state"], record["ranks"]
    yield f"{record['system']}: {record['parameters'] / 1e6:.0f} million parameters, state {state / GIB:.2f} GiB"
    for name in ("fresh", "resumed"):
        run = record[name]
        imports, all_imports = run["most"][IMPORTED], run["together"][IMPORTED]
        for part, most in run["most"].items():
            if part not in (IMPORTED, DONE):
                rank = max(have - base for have, base in zip(most, imports, strict=True))
                total = run["together"][part] - all_imports
                yield (
                    f"  {name:<8} {part:<11} rank {rank / GIB:5.2f} GiB ({rank * ranks / state:4.2f} of its share), "
                    f"all {total / GIB:5.2f} GiB ({total / state:4.2f} of the state)"
                )
    if record["predicted"] is not None:
        yield limits(record)


def limits(record: dict[str, Any]) -> str:
    """The most of all ranks, and of the one that exceeds its share most, as ratios to state, predicted activations and a
    unit."""
    mesh, unit = ml.Plan.parse(record["system"]).mesh, record["unit"]
    predicted = [record["predicted"][mesh.place(rank).pp] for rank in range(mesh.size)]
    activations = [each["kept"] + each["temporaries"] for each in predicted]
    state = [4 * each["parameters"] for each in predicted]
    everyone, alone = 0, 0.0
    for run in (record["fresh"], record["resumed"]):
        imports, all_imports = run["most"][IMPORTED], run["together"][IMPORTED]
        for part in run["most"].keys() - {IMPORTED, DONE}:
            everyone = max(everyone, run["together"][part] - all_imports)
            for rank in range(mesh.size):
                have = run["most"][part][rank] - imports[rank] - unit
                alone = max(alone, have / (state[rank] + activations[rank]))
    whole = record["state"] + sum(activations) + unit
    return (
        f"  all ranks {everyone / whole:.2f} of state, predicted activations and a unit ({whole / GIB:.2f} GiB); "
        f"a rank, without a unit, at most {alone:.2f} of its share of state and activations"
    )


# --- On a rank.


def enter(arguments: argparse.Namespace, part: str) -> None:
    """This rank is in a part of its run, until it enters another."""
    mark = Path(arguments.directory, f"part-{os.environ['RANK']}")
    draft = mark.with_suffix(".new")
    draft.write_text(f"{os.getpid()} {part}")
    draft.rename(mark)


def on_rank(arguments: argparse.Namespace, size: Size) -> None:
    torch.set_num_threads(1)
    enter(arguments, IMPORTED)
    while len(list(Path(arguments.directory).glob("part-*[0-9]"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(arguments.every)  # all are looked at together
    time.sleep(20 * arguments.every)
    (theirs if arguments.systems == [PEER] else ours)(arguments, size)
    enter(arguments, DONE)
    time.sleep(5 * arguments.every)


def job_of(size: Size, batch: int) -> ml.Job:
    return ml.Job(
        model=partial(GPT, size), loss=loss, optimizer=make_optimizer, data=partial(make_data, 4 * batch, size),
        batch_size=batch, steps=6, shuffle=False,
        evaluate=ml.Evaluate(data=partial(make_data, 2 * batch, size), metrics={"loss": loss}, every=100),
    )  # fmt: skip


def ours(arguments: argparse.Namespace, size: Size) -> None:
    out = Path(arguments.directory, "run")
    settings: dict[str, Any] = {"transport": "gloo"} if "zero=3" in arguments.systems[0] else {}
    enter(arguments, "start-up")
    with ml.Trainer(
        job_of(size, arguments.batch), arguments.systems[0], devices="cpu", out=out, cache="off",
        resume=out if arguments.resume else None, **settings,
    ) as trainer:  # fmt: skip
        enter(arguments, "steps")
        for _, batch in zip(range(3), trainer.batches(), strict=False):
            trainer.step(batch)
        enter(arguments, "evaluation")
        trainer.evaluate()
        enter(arguments, "checkpoint")
        trainer.save()


def theirs(arguments: argparse.Namespace, size: Size) -> None:
    """FSDP2: every block a unit, and the rest another."""
    enter(arguments, "start-up")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = GPT(size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
    optimizer = make_optimizer(list(model.named_parameters()))
    path = Path(arguments.directory, "dcp")
    if arguments.resume:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        del weights, state
    batches = make_data(4 * arguments.batch, size).tensors[0].split(arguments.batch)

    def mine(batch: Tensor) -> list[Tensor]:
        return [batch.chunk(dist.get_world_size())[dist.get_rank()]]

    enter(arguments, "steps")
    for batch in batches[:3]:
        loss(model, mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    enter(arguments, "evaluation")
    with torch.no_grad():
        for batch in batches[:2]:
            loss(model, mine(batch))
    enter(arguments, "checkpoint")
    weights, state = get_state_dict(model, optimizer)
    if arguments.resume and dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
