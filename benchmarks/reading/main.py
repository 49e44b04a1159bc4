"""CPU seconds until a plan is described, phase by phase, against the number of layers.

    python benchmarks/reading/main.py --json -

LLaMA of one width at several depths, by shapes alone: read, priced, divided over tp and cut over pp as
`meshloom describe --plan` does. Each depth runs in a process of its own, in turns, so that nothing that was
read before helps.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from records import write_records

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.planner.describe import describe
from meshloom.planner.divided import divided
from meshloom.planner.ranks import shares_of
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import staged


class Samples:
    """So many samples, all alike; only their shapes count."""

    def __init__(self, num_samples: int, num_tokens: int) -> None:
        self._tokens = torch.zeros(num_tokens, dtype=torch.long)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens, "labels": self._tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="write one record per line to FILE; - is standard output"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 126])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--plan", default="dp=8,pp=2,tp=8,microbatches=8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # measure this depth here
    arguments = parser.parse_args()
    if arguments.one:
        print(
            json.dumps(measure(arguments.one, arguments.width, arguments.tokens, Plan.parse(arguments.plan)))
        )
        return 0
    rounds: dict[int, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for layers in arguments.layers:
            rounds.setdefault(layers, []).append(_in_a_process(layers))
    records = [record_of(layers, found) for layers, found in rounds.items()]
    write_records(records, arguments.json)
    for record in records:
        shares = ", ".join(
            f"{phase} {seconds:.1f} ({seconds / record['total']:.0%})"
            for phase, seconds in record["seconds"].items()
        )
        print(
            f"{record['layers']:4} layers  {record['total']:6.1f} s  {record['mebibytes']:6} MiB   {shares}",
            file=sys.stderr,
        )
    return 0


def measure(layers: int, width: int, tokens: int, plan: Plan) -> dict[str, Any]:
    """CPU seconds of the phases of one description, and the most memory that this process had."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_attention_heads=32,
    )
    job = Job(
        model=lambda: LlamaForCausalLM(config),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        data=lambda: Samples(plan.num_chunks, tokens),
        batch_size=plan.num_chunks,
        steps=1,
    )
    started = time.process_time()
    readings = Readings(job)
    describe(readings, batch_size=1)
    division = divided(readings, plan) if plan.tp > 1 else None
    stages = staged(readings, plan, offers=False) if plan.pp > 1 else None
    shares_of(readings, plan, division, stages)
    total = time.process_time() - started
    return {
        "seconds": readings.timings.seconds,
        "total": total,
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def record_of(layers: int, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    return {
        "layers": layers,
        "seconds": {
            phase: statistics.median(each["seconds"][phase] for each in rounds)
            for phase in rounds[0]["seconds"]
        },
        "total": statistics.median(each["total"] for each in rounds),
        "mebibytes": max(each["mebibytes"] for each in rounds),
        "rounds": len(rounds),
    }


def _in_a_process(layers: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", str(layers)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
