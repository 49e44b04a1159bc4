"""Pipelines: what the executor costs, how idle ranks are beside the formula, and a step beside PyTorch's
pipelining.

python benchmarks/pipeline/main.py --overhead --json -        # microseconds per action, one thread
python benchmarks/pipeline/main.py --waiting --json -         # stages that sleep, 4 and 8 processes
python benchmarks/pipeline/main.py --gpt --json -             # the benchmark GPT in 2 processes, beside torch.distributed.pipelining
python benchmarks/pipeline/main.py --alive --json -           # what is alive in a step, as microbatches grow
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import overheads
from waiting import time_schedules

from meshloom.core.schedules import SCHEDULES

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]  # the benchmark GPT
from launched import launched
from records import write_records

PARTS = ("overhead", "waiting", "gpt", "alive")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for part in PARTS:
        parser.add_argument(f"--{part}", dest="part", action="store_const", const=part, help=f"see {part}.py")
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[4, 8],
        help="--waiting: in runs of their own; --alive takes the least",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        nargs="+",
        help="default: 8 and 16 for --waiting, 4 and 8 for --gpt, 4, 16 and 64 for --alive",
    )
    parser.add_argument("--bytes", type=int, default=256, help="--waiting: of the value between two stages")
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=40.0,
        help="--waiting: forward of a microbatch through a rank's stages",
    )
    named = [name for name in SCHEDULES if name != "found"]  # which depends on the stages
    parser.add_argument("--schedules", nargs="+", default=named, choices=named)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="--gpt: steps of each system in a round")
    arguments = parser.parse_args()
    if arguments.part is None:
        parser.error(f"Choose one of {', '.join(f'--{part}' for part in PARTS)}.")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        run_gpt(arguments)
        return 0
    records: list[dict[str, Any]] = []
    if arguments.part == "overhead":
        records = overheads()
    elif arguments.part == "waiting":
        for ranks in arguments.ranks:
            for number in arguments.microbatches or [8, 16]:
                records += on_ranks(
                    time_schedules,
                    ranks,
                    arguments.schedules,
                    number,
                    arguments.rounds,
                    arguments.bytes,
                    arguments.milliseconds / 1e3,
                )
    elif arguments.part == "gpt":
        from training import RANKS

        records = launched(__file__, RANKS, sys.argv[1:])
    elif arguments.part == "alive":
        from alive import kept_bytes

        records = kept_bytes(arguments.schedules, arguments.microbatches or [4, 16, 64], min(arguments.ranks))
    write_records(records, arguments.json)
    for record in records:
        print(described(record, records), file=sys.stderr)
    return 0


def run_gpt(arguments: argparse.Namespace) -> None:
    """On each of the ranks that torchrun started; rank 0 writes the records."""
    import training

    records = [
        record for number in arguments.microbatches or [4, 8]
        for record in training.time_systems(arguments.schedules, number, arguments.rounds, arguments.steps)
    ]  # fmt: skip
    if os.environ["RANK"] == "0":
        Path(arguments.json).write_text("".join(json.dumps(record) + "\n" for record in records))


def on_ranks(
    function: Callable[..., list[dict[str, Any]]], size: int, *arguments: Any
) -> list[dict[str, Any]]:
    """What `function(*arguments)` returns on rank 0 of `size` processes over Gloo, of one thread each."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(
                target=_rank, args=(rank, size, Path(directory), function, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"Ranks ended with exit codes {[rank.exitcode for rank in ranks]}.")
        return json.loads(Path(directory, "records.json").read_text())


def _rank(
    rank: int,
    size: int,
    directory: Path,
    function: Callable[..., list[dict[str, Any]]],
    arguments: tuple[Any, ...],
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=size)
    records = function(*arguments)
    if rank == 0:
        Path(directory, "records.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def described(record: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """A line of a table."""
    head = f"{record['schedule']:<12} p={record['ranks']} m={record['microbatches']:<3}"
    if "idle" in record:
        idle, seconds = record["idle"], record["seconds"]["median"]
        return f"{head} idle {idle['median']:6.1%} ({idle['minimum']:.1%} to {idle['maximum']:.1%}), on paper {idle['on_paper']:.1%}; {seconds:.3f} s"
    if "kept" in record:
        mib = "  ".join(f"{each / 2**20:.1f}" for each in record["kept"])
        return f"{head} kept on each rank, MiB: {mib}; peak of the process {record['peak_rss'] / 2**20:.0f} MiB above what it held"
    if "microseconds_per_action" in record:
        takes = record["microseconds_per_action"]
        return f"{head} {record['what']:<12} {takes['median']:5.1f} us per action ({takes['minimum']:.1f} at least)"
    seconds = record["seconds"]
    line = f"{head} {record['system']:<11} {seconds['median'] * 1e3:7.1f} ms ({seconds['minimum'] * 1e3:.1f} to {seconds['maximum'] * 1e3:.1f})"
    if record["system"] == "pipelining":
        return line
    same = ("schedule", "microbatches")
    peer = next(
        each
        for each in records
        if each["system"] == "pipelining" and all(each[key] == record[key] for key in same)
    )
    paired = statistics.median(
        own / their for own, their in zip(record["rounds"], peer["rounds"], strict=True)
    )
    bound = record["on_paper"] + record["update"]
    return f"{line}   {seconds['median'] / peer['seconds']['median']:.3f} ({paired:.3f}) of pipelining, {seconds['median'] / bound:.3f} of the bound"


if __name__ == "__main__":
    sys.exit(main())
