"""A digest of what a run is, equal in whatever precision it runs: the plan, the job's settings, and each rank's programs,
shards, schedule and share of the updates.

`meshloom train` and `meshloom verify` print it, so that what was verified can be seen to be what trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from meshloom.comm.objects import collect
from meshloom.exchange.disjoint import parts_of
from meshloom.exchange.exchange import Exchange
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.ir.nodes import Node
from meshloom.replica.replica import Replica


def run_digest(replica: Replica) -> str:
    """Of all ranks, 12 hexadecimal digits; equal on all of them."""
    mine = _hash(_facts(replica))
    return _hash(collect(replica.context.world, mine))[:12]


def _hash(lines: Iterator[str] | list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _facts(replica: Replica) -> Iterator[str]:
    job, stages = replica.job, replica.engine.stages
    yield str(replace(replica.plan, keyed_draws=False))
    yield f"batches of {job.batch_size}, seed {job.seed}, clipped to {job.clip_grad_norm}"
    for name, pieces in sorted(replica.shards.pieces.items()):
        yield f"{name}: {pieces}"
    for stage in stages.cut:
        yield from _of_stage(stage)
    if stages.cut:
        schedule = stages.schedule(replica.plan.microbatches)
        yield " ".join(map(str, schedule.actions[replica.context.place.pp]))
    for each in parts_of(replica.exchange, Exchange):
        yield f"{type(each).__name__}, one copy: {each.ownership.memory == 'shared'}"
    yield from (f"{each.name} {each.start}:{each.stop}" for each in replica.exchange.ownership.owned)


def _of_stage(stage: Stage) -> Iterator[str]:
    yield f"stage {stage.number}"
    yield from (f"{each.value} from {each.source} to {each.destination}" for each in stage.incoming)
    yield from map(_of_node, stage.program.nodes)
    yield f"sends {stage.sent}, updates {sorted(stage.changing)}"


def _of_node(node: Node) -> str:
    """Everything but precisions, and constants, which may name them."""
    outputs = [(each.shape, each.requires_grad) for each in node.outputs]
    return f"{node.name} = {node.operator}({', '.join(ref.name for ref in node.operands())}) {outputs} {node.draw} {node.num_draws}"
