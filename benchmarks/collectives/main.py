"""Seconds per collective between the processes of one host: shared memory beside Gloo and Open MPI.

    python benchmarks/collectives/main.py --json -     # a record per system, mode, number of ranks and size
    python benchmarks/collectives/main.py --table      # the same as tables

The ranks of a size of world are one set of processes of one thread each that hosts all systems, so that they
meet the
same machine. They are timed in turns: a round is some calls of each, and the order is reversed from round to
round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from systems import MODES, TIMEOUT, Operation, open_systems

sys.path.append(str(Path(__file__).parents[1]))
from records import write_records

SIZES = [4 << 10, 32 << 10, 256 << 10, 1 << 20, 5 << 20, 25 << 20, 100 << 20]
TURN_SECONDS = 0.03  # of a system in a round
TURN_CALLS = (3, 2000)  # at least, at most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print tables: to standard output, or beside records there to standard error",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=["shm", "gloo", "openmpi", "floor"],
        help="default: all that are installed",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=SIZES, help="of the whole tensor: multiples of 4 * ranks"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)  # this process is a rank
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.systems = arguments.systems or [
        name for name in ("shm", "gloo", "openmpi", "floor") if name != "openmpi" or has_openmpi()
    ]
    if arguments.meeting:
        run_rank(arguments, Path(arguments.meeting))
        return 0
    records: list[dict[str, Any]] = []
    for size in arguments.ranks:
        records += run_world(arguments, size)
    write_records(records, arguments.json)
    if arguments.table:
        print(tables(records), file=sys.stderr if arguments.json == "-" else sys.stdout)
    return 0


def has_openmpi() -> bool:
    """Whether mpi4py and mpirun are installed."""
    return importlib.util.find_spec("mpi4py") is not None and mpirun() is not None


def mpirun() -> str | None:
    """The one beside this Python (the wheel's), or the system's."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def run_world(arguments: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    """The records of one number of ranks. mpirun starts the ranks where Open MPI takes part; its processes
    may run on any core, as the others' do."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="collectives-") as directory:
        words = [
            sys.executable,
            __file__,
            "--meeting",
            directory,
            "--rounds",
            str(arguments.rounds),
            "--ranks",
            str(size),
        ]
        for option in ("systems", "modes", "bytes"):
            words += [f"--{option}", *map(str, getattr(arguments, option))]
        if "openmpi" in arguments.systems:
            launcher = [
                mpirun() or "mpirun",
                "-n",
                str(size),
                "--map-by",
                ":OVERSUBSCRIBE",
                "--bind-to",
                "none",
            ]
            launcher += ["--allow-run-as-root"] * (os.geteuid() == 0)
            commands = [[*launcher, *words]]
        else:
            commands = [[*words, "--rank", str(rank)] for rank in range(size)]
        processes = [subprocess.Popen(command, env=environment) for command in commands]
        try:
            codes = [process.wait() for process in processes]
            if any(codes):
                raise SystemExit(f"Ranks ended with exit codes {codes}.")
        finally:
            for process in processes:
                process.kill()
        return [json.loads(line) for line in Path(directory, "records.json").read_text().splitlines()]


def run_rank(arguments: argparse.Namespace, meeting: Path) -> None:
    """Time all modes at all sizes; rank 0 writes the records."""
    torch.set_num_threads(1)
    [size], rank = arguments.ranks, arguments.rank
    if rank is None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # one thread calls it, which spares it locks
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=size, timeout=TIMEOUT
    )
    systems = open_systems(arguments.systems, rank, size, meeting, max(arguments.bytes))
    records: list[dict[str, Any]] = []
    for mode in arguments.modes:
        for num_bytes in [0] if mode == "barrier" else arguments.bytes:
            operations = {
                name: made for name, system in systems.items() if (made := system.operation(mode, num_bytes))
            }
            for name, operation in operations.items():
                if name != "floor":
                    check(name, mode, operation, rank, size)
            for name, seconds in time_in_turns(operations, arguments.rounds).items():
                summary = {
                    "median": statistics.median(seconds),
                    "minimum": min(seconds),
                    "maximum": max(seconds),
                }
                record = {
                    "system": name,
                    "mode": mode,
                    "ranks": size,
                    "bytes": num_bytes,
                    "seconds": summary,
                    "rounds": seconds,
                }
                records.append(record)
    if rank == 0:
        (meeting / "records.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    dist.barrier()
    dist.destroy_process_group()


def check(name: str, mode: str, operation: Operation, rank: int, size: int) -> None:
    """What is timed is right: whole numbers, so that the order of the sums does not matter. Leaves ones: sums
    of ones that grow cost what others cost."""
    positions = torch.arange(operation.given.numel()) % 64
    operation.given.copy_(positions + 64 * rank)
    operation.call()
    if mode == "all_gather":
        expected = (positions + 64 * torch.arange(size)[:, None]).view(-1)
    else:
        expected = positions * size + 64 * sum(range(size))
        expected = expected.chunk(size)[rank] if mode == "reduce_scatter" and len(expected) else expected
    if not torch.equal(operation.result, expected.to(torch.float32)):
        raise SystemExit(f"{mode} of {name} on rank {rank} is wrong.")
    operation.given.fill_(1.0)


def time_in_turns(operations: dict[str, Operation], num_rounds: int) -> dict[str, list[float]]:
    """Seconds per call of the slowest rank, in each round."""
    calls = dict.fromkeys(operations, TURN_CALLS[0])
    rounds: list[list[float]] = []
    for number in range(num_rounds + 1):  # the first warms up and says how many calls make a turn
        turn = {
            name: time_calls(operations[name], calls[name])
            for name in list(operations)[:: -1 if number % 2 else 1]
        }
        slowest = torch.tensor([turn[name] for name in operations], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number:
            rounds.append(slowest.tolist())
        else:
            least, most = TURN_CALLS
            calls = {
                name: int(min(max(TURN_SECONDS / seconds, least), most))
                for name, seconds in zip(operations, slowest.tolist(), strict=True)
            }
    return {name: list(column) for name, column in zip(operations, zip(*rounds, strict=True), strict=True)}


def time_calls(operation: Operation, count: int) -> float:
    """Seconds per call."""
    operation.given.fill_(1.0)
    dist.barrier()
    operation.call()  # ranks leave a barrier of Gloo some hundred microseconds apart
    started = time.perf_counter()
    for _ in range(count):
        operation.call()
    return (time.perf_counter() - started) / count


def tables(records: list[dict[str, Any]]) -> str:
    """One table per number of ranks and mode: milliseconds, and how many times as long as shm, by medians and
    in brackets the median of rounds."""
    lines: list[str] = []
    for size, mode in dict.fromkeys((record["ranks"], record["mode"]) for record in records):
        rows = [record for record in records if (record["ranks"], record["mode"]) == (size, mode)]
        names = list(dict.fromkeys(record["system"] for record in rows))
        lines += [
            f"\n{mode}, {size} ranks: ms",
            "     bytes" + "".join(f"{name:>12}{'/ shm':>17}" for name in names).rstrip(),
        ]
        for num_bytes in dict.fromkeys(record["bytes"] for record in rows):
            of = {record["system"]: record for record in rows if record["bytes"] == num_bytes}
            line = f"{num_bytes:10}"
            for name in names:
                line += f"{of[name]['seconds']['median'] * 1e3:12.4f}"
                line += f"{_ratio(of[name], of['shm']):>17}" if "shm" in of and name != "shm" else " " * 17
            lines.append(line.rstrip())
    return "\n".join(lines)


def _ratio(record: dict[str, Any], base: dict[str, Any]) -> str:
    paired = statistics.median(
        own / other for own, other in zip(record["rounds"], base["rounds"], strict=True)
    )
    return f"{record['seconds']['median'] / base['seconds']['median']:.2f} ({paired:.2f})"


if __name__ == "__main__":
    sys.exit(main())
