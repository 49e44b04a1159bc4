"""The bytes that a rank's steps should send, added up over the parts of a replica."""

from __future__ import annotations

from meshloom.parameters import replica_check
from meshloom.replica import metrics
from meshloom.replica.buffers import batch_norm
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import equal_slices, replicated_state
from meshloom.telemetry.traffic import ExpectedBytes


def expected_bytes(replica: Replica) -> ExpectedBytes:
    """Of this rank along every axis."""
    parts = [
        ExpectedBytes(once=replica.copied, so_far=replica.saved),
        replica.engine.expected_bytes(),
        replica.exchange.expected_bytes(),
        *(statistics.expected_bytes() for statistics in replica.scope.statistics.values()),
    ]
    if replica.updates:
        parts += [replica.updater.expected_bytes(), replica.row_limits.expected_bytes()]
    if replica.plan.dp > 1:
        parts += [replica.sums.expected_bytes(), replica_check.expected_bytes(replicated_state(replica))]
        equals, slices = equal_slices(replica)
        parts += [replica_check.expected_bytes(slices)] if equals is not None else []
        if replica.job.evaluate:
            parts.append(metrics.expected_bytes(replica.job.evaluate.metrics))
        if replica.plan.sync_batch_norm:
            parts.append(batch_norm.expected_bytes(replica.model, replica.plan.microbatches))
    return sum(parts, ExpectedBytes())
