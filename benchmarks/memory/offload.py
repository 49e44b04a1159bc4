"""Peak memory of a process that trains with and without offload=optimizer, and the seconds of its steps.

    python benchmarks/memory/offload.py --json -

A GPT of about 50 million parameters in float32 with AdamW, dp=1. Each run is a process, whose proportional set size
(Pss in /proc/PID/smaps_rollup) this one reads every 20 ms, with pages of mapped files and without.
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
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "step")]
from gpt import GPT, Size, loss, make_data, make_optimizer
from records import write_records

import meshloom as ml

SIZE = Size(vocabulary=8000, width=640, blocks=8, heads=10, length=128, tied=False)
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per plan to FILE; - is standard output"
    )
    parser.add_argument("--plans", nargs="+", default=["dp=1", "dp=1,offload=optimizer"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", default=tempfile.gettempdir(), help="directory for the state, on a disk")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(train(arguments.plans[0], arguments.batch, arguments.steps)))
        return 0
    records: list[dict[str, Any]] = []
    for plan in arguments.plans:
        options = ["--run", "--plans", plan, "--batch", str(arguments.batch), "--steps", str(arguments.steps)]
        records.append({"plan": plan, **watched([sys.executable, __file__, *options], arguments.out)})
        before = records[0]["seconds_of_a_step"]
        records[-1]["step_ratio"] = round(records[-1]["seconds_of_a_step"] / before, 2)
    write_records(records, arguments.json)
    return 0


def watched(command: list[str], directory: str) -> dict[str, Any]:
    """What a process prints, and the most of its memory at one time, in MiB."""
    peaks = {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": directory}
    ) as process:
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            except OSError:  # it has ended
                break
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
            peaks = {name: max(peak, found.get(name, 0)) for name, peak in peaks.items()}
            time.sleep(0.02)
        printed = process.communicate()[0]
    named = {f"peak_{name.lower()}_mib": round(peak / MIB) for name, peak in peaks.items()}
    return {**json.loads(printed.splitlines()[-1]), **named}


def train(plan: str, batch: int, steps: int) -> dict[str, Any]:
    """A step's seconds, and what parameters and the optimizer's state take."""
    job = ml.Job(
        model=lambda: GPT(SIZE),
        loss=loss,
        optimizer=make_optimizer,
        data=lambda: make_data(64, SIZE),
        batch_size=batch,
        steps=steps,
    )
    seconds: list[float] = []
    with ml.Trainer(job, plan, devices="cpu") as trainer:
        for each in trainer.batches():
            began = time.perf_counter()
            trainer.step(each)
            seconds.append(time.perf_counter() - began)
        replica = trainer.replicas[0]
        mib = sum(each.nbytes for each in replica.model.parameters()) / MIB
    return {"parameters_mib": round(mib), "seconds_of_a_step": round(statistics.median(seconds[2:]), 3)}


if __name__ == "__main__":
    sys.exit(main())
