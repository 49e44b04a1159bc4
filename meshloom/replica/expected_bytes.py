"""The bytes that a rank's steps should send, added up over the parts of a replica."""

from __future__ import annotations

from dataclasses import replace

from meshloom.parameters import replica_check
from meshloom.replica import metrics
from meshloom.replica.buffers import batch_norm
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import equal_slices, replicated_state
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


def expected_bytes(replica: Replica) -> ExpectedBytes:
    """Of this rank along every axis."""
    parts = [
        ExpectedBytes(once=replica.copied),
        replica.engine.expected_bytes(),
        _each(replica, replica.exchange.expected_bytes()),
        replica.scope.expected_bytes(each_time=_evaluates_often(replica)),
    ]
    if replica.updates:
        parts.append(replica.updater.expected_bytes())
    if replica.plan.dp > 1:
        parts += [
            _each(replica, replica.sums.expected_bytes()),
            replica_check.expected_bytes(replicated_state(replica)),
        ]
        equals, slices = equal_slices(replica)
        parts += [replica_check.expected_bytes(slices)] if equals is not None else []
        if replica.job.evaluate:
            parts.append(metrics.expected_bytes(replica.job.evaluate.metrics))
        if replica.plan.sync_batch_norm:
            synchronised = batch_norm.expected_bytes(replica.model, replica.plan.microbatches)
            parts.append(_each(replica, synchronised))
    return sum(parts, ExpectedBytes())


def _each(replica: Replica, expected: ExpectedBytes) -> ExpectedBytes:
    """What is handed over in every step; where a step evaluates the loss more often, in every evaluation."""
    if not _evaluates_often(replica):
        return expected
    so_far = expected.so_far + expected.per_step * replica.evaluations
    return replace(expected, per_step=Traffic(), so_far=so_far)


def _evaluates_often(replica: Replica) -> bool:
    """Whether a step may evaluate the loss more than once."""
    return replica.updates and replica.updater.takes_closures
