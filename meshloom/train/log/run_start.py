"""What a run begins with and what it holds, as plain values for its log."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.machine.cores import cores
from meshloom.machine.host_memory import total_bytes
from meshloom.machine.packages import version_of
from meshloom.planner.rehearsal.held import held_by
from meshloom.replica.replica import Replica


class WhereItRuns(NamedTuple):
    """Those of a run: their kind, as in `--devices`, and why they are these."""

    kind: str
    why: str


def start_values(job: Job, plan: Plan, devices: WhereItRuns, *, steps: int, step: int) -> dict[str, Any]:
    """steps: of the whole run. step: those that were done before."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "plan": str(plan),
        "devices": devices.kind,
        "why": devices.why,
        "batch_size": job.batch_size,
        "steps": steps,
        "step": step,
        "time": time.time(),
        "environment": {
            "meshloom": version_of("meshloom") or "run from its source",
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
            "cores": cores(),
            "memory": total_bytes(),
            "GPUs": ", ".join(gpus) or "none",
        },
    }


def division_values(replica: Replica) -> dict[str, Any]:
    """The model, and for each parameter in its order: the full shape, the shape of each rank's part along tp where it is
    divided, and the ranks along pp that hold it, its owner first."""
    shards, holders = replica.shards, replica.engine.holders or {}
    rows: list[dict[str, Any]] = []
    for name, parameter in replica.model.named_parameters():
        row: dict[str, Any] = {"name": name, "shape": shards.whole_shape(name, parameter)}
        if pieces := shards.pieces.get(name):
            row["parts"] = [pieces.local_shape(rank) for rank in range(pieces.num_ranks)]
        if name in holders:
            row["stages"] = list(holders[name])
        rows.append(row)
    return {
        "model": type(replica.model).__name__,
        "parameters": replica.num_parameters,
        "rows": rows,
    }


def memory_values(replica: Replica) -> Mapping[str, int]:
    """Bytes that a rank holds from step to step, by kind, after one or more steps. Activations are not among them."""
    held = held_by(replica, 0, 0.0)
    return {
        "parameters": held.parameters + held.full,
        "gradients": held.gradients + held.on_the_way,
        "optimizer": replica.updater.state.num_bytes,
        "buffers": held.buffers,
    }
