"""The most memory that each rank has while its plan is verified, beside the same plan in training.

    python benchmarks/memory/verifying.py --json -

A GPT of about 50 million parameters in float32 with AdamW. Memory is the kernel's `Pss`, which this process reads of
every rank while it runs; what a rank has at the end of its imports (`--imported`, in MiB) is in it. `together` is the most that all
have at one time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
from gpt import GPT, Size, loss, make_data, make_optimizer
from records import write_records

import meshloom as ml

SIZE = Size(vocabulary=8000, width=640, blocks=8, heads=10, length=128, tied=False)
BATCH, MIB = 4, 2**20
job = ml.Job(
    model=lambda: GPT(SIZE),
    loss=loss,
    optimizer=make_optimizer,
    data=lambda: make_data(4 * BATCH, SIZE),
    batch_size=BATCH,
    steps=2,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per run to FILE; - is standard output"
    )
    parser.add_argument("--plans", nargs="+", default=["tp=2", "pp=2,microbatches=2", "dp=2,zero=3"])
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two looks")
    arguments = parser.parse_args()
    parameters = sum(each.nbytes for each in GPT(SIZE).parameters())
    records: list[dict[str, Any]] = []
    for plan in arguments.plans:
        for verb, options in (("train", ["--transport", "gloo"]), ("verify", ["--quick", "--steps", "2"])):
            command = [sys.executable, "-m", "meshloom", verb, f"{__file__}:job", "--plan", plan, *options]
            peaks = watched(command, arguments.every)
            found = {name: round(size / MIB) for name, size in sorted(peaks.items())}
            record = {
                "plan": plan,
                "verb": verb,
                "parameters_mib": round(parameters / MIB),
                "peak_mib": found,
            }
            records.append(record)
    write_records(records, arguments.json)
    return 0


def watched(command: list[str], every: float) -> dict[str, int]:
    """Rank, or the process of one device -> the most bytes that it had while the command ran; "together": of all at one time."""
    peaks: dict[str, int] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            together = 0
            for pid in [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]:
                with suppress(OSError, ValueError):
                    if (name := name_of(pid, process.pid)) is not None:
                        peaks[name] = max(peaks.get(name, 0), size := proportional(pid))
                        together += size
            peaks["together"] = max(peaks.get("together", 0), together)
            time.sleep(every)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peaks


def name_of(pid: int, launcher: int) -> str | None:
    """The rank that a child of the launcher is, or that its child is one device."""
    parent = parent_of(pid)
    if launcher not in (parent, parent_of(parent)):
        return None
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    if any(each.startswith(b"MESHLOOM_REFERENCE_FD=") for each in variables):
        return "one device"
    return next((each[5:].decode() for each in variables if each.startswith(b"RANK=")), None)


def parent_of(pid: int) -> int:
    """Of a process, its parent's number."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def proportional(pid: int) -> int:
    """The `Pss` of a process, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
