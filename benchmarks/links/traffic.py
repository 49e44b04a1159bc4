"""Bytes of dp, pp and tp plans: by the formulas of R4.2 and R5.3, predicted by the program, counted in the
run, and on the wires.

A collective sends more or less than what is handed to it. Over Gloo, of n ranks each:

    send 1      all_reduce 2 (n - 1) / n      all_gather n - 1
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from network import Host
from steps import run_on_hosts

import meshloom as ml

sys.path.append(str(Path(__file__).parents[1] / "step"))  # the benchmark GPT

import gpt

BATCH = 4
CUT = "blocks.3"
PLANS = (
    "dp=2",
    f"pp=2,microbatches=2,cuts={CUT}",
    "tp=2",
    f"pp=2,tp=2,microbatches=2,cuts={CUT}",
    "dp=2,tp=2",
)
ELEMENT = 4  # bytes of a float32


def count_traffic(hosts: Sequence[Host], steps: int) -> list[dict[str, Any]]:
    """A record per plan; bytes are of one step and of all ranks together."""
    return [_record(run_on_hosts(hosts, _job(steps), plan), steps) for plan in PLANS]


def _record(run: Mapping[str, Any], steps: int) -> dict[str, Any]:
    plan = ml.Plan.parse(run["plan"])
    counted, predicted = (_totals(run[name], steps) for name in ("counted", "predicted"))
    payload = sum(
        of_rank * sent_share(name, getattr(plan, axis)) / steps
        for rank in run["counted"]
        for axis, kinds in rank.items()
        for name, of_rank in kinds.items()
    )
    wire = sum(run["wire_bytes"]) / steps
    return {
        "part": "traffic",
        "plan": run["plan"],
        "formula": formula_bytes(plan),
        "predicted": predicted,
        "counted": counted,
        "payload_on_wire": payload,
        "wire": wire,
        "packets": sum(run["packets"]) / steps,
        "overhead": wire / payload - 1,
    }


def _totals(ranks: Sequence[Mapping[str, Mapping[str, int]]], steps: int) -> dict[str, float]:
    """Bytes per step along each axis."""
    found: dict[str, float] = {}
    for rank in ranks:
        for axis, kinds in rank.items():
            found[axis] = found.get(axis, 0.0) + sum(kinds.values()) / steps
    return {axis: count for axis, count in found.items() if count}


def sent_share(collective: str, size: int) -> float:
    """Bytes that a rank sends on a wire for each byte that it hands in, `size` ranks on hosts of their own
    over Gloo.

    >>> sent_share("all_reduce", 4), sent_share("all_gather", 4), sent_share("send", 2)
    (1.5, 3.0, 1.0)
    """
    shares = {
        "send": 1.0,
        "all_reduce": 2 * (size - 1) / size,
        "all_gather": size - 1.0,
        "reduce_scatter": (size - 1) / size,
    }
    return shares[collective]


def formula_bytes(plan: ml.Plan) -> dict[str, float]:
    """What R4.2 and R5.3 say of the benchmark GPT, bytes per step along each axis, all ranks.

    pp: each cut's output per sample, times the batch, forward and backward, on each rank of tp. tp: in each
    block two pairs of a column and a row split, one all-reduce forward and one backward each, on each rank;
    what the embeddings and the loss send comes to it.
    dp: every gradient once, on each rank.
    """
    activations = BATCH * gpt.SMALL.length * gpt.SMALL.width * ELEMENT
    found: dict[str, float] = {}
    if plan.pp > 1:
        found["pp"] = (plan.pp - 1) * 2 * activations * plan.tp
    if plan.tp > 1:
        found["tp"] = gpt.SMALL.blocks * 2 * 2 * activations * plan.tp
    if plan.dp > 1 and plan.tp == 1:
        found["dp"] = (
            sum(parameter.numel() for parameter in gpt.make_model().parameters()) * ELEMENT * plan.dp
        )
    return found


def _job(steps: int) -> ml.Job:
    return ml.Job(
        model=gpt.make_model,
        loss=gpt.loss,
        optimizer=gpt.make_optimizer,
        data=lambda: gpt.make_data(BATCH * (steps + 1)),
        batch_size=BATCH,
        steps=steps + 1,
    )
