"""What a job and its plan attach to a rank's step, once, when it has been built."""

from __future__ import annotations

from functools import partial

import torch

from meshloom.core.job import NamedParameters
from meshloom.replica import step_checks
from meshloom.replica.attachments import Averaged
from meshloom.replica.gradient_completion import made_alike
from meshloom.replica.replica import Replica


def attach(replica: Replica, frozen: NamedParameters) -> None:
    """What this job and plan need at the points of a step. frozen: what nothing trains."""
    at, engine, plan = replica.attached, replica.engine, replica.inner
    ownership = replica.exchange.ownership
    # values of units (zero=3) are looked at where ranks let go of them; a single chunk may write what nothing trains
    in_units, one_copy = ownership.memory == "sliced", ownership.memory == "shared"
    world = replica.context.world if engine.stages.one_by_one else None
    unwritten = [] if in_units or plan.num_chunks == 1 else frozen
    writes = step_checks.ChunkWrites(unwritten, replica.named if one_copy else [], world)
    engine.attach(at)
    if frozen:
        at.begin.append(lambda step: step_checks.check_frozen(frozen))
    if pace := replica.pace:
        at.begin.append(lambda step: pace.begin())
        at.chunks_done.append(pace.end)
    if _adds_in_any_order(replica.context.device):
        at.synced.append(
            lambda step, gradients: made_alike(
                engine.team_sums, engine.replicated, replica.exchange, gradients
            )
        )
    if unwritten or one_copy:
        at.around.append(writes.chunks)
    if engine.stages.runs_modules and not (in_units or one_copy):
        at.around.append(step_checks.OwnMemory(replica.named).chunks)
    if replica.sums.scale is not None:
        at.synced.append(partial(_count_overflows, replica))
        at.published.append(lambda found: replica.sums.end_update())
    if replica.updates and (fetch := replica.updater.fetch_ahead):
        at.begin.append(lambda step: fetch())
    if one_copy:
        at.synced.append(writes.check_copy)
        at.published.append(writes.updated)
    if replica.scope.ends_chunks:
        at.checked.append(replica.scope.finish)
    if engine.borrows:
        at.published.append(lambda found: engine.refresh_borrowed())
    if replica.updates and (averages := replica.updater.state.averages):
        at.published.append(lambda found: None if found.overflowed else averages.update())


def _adds_in_any_order(device: torch.device) -> bool:
    """Whether kernels of this device may give other last bits from call to call, as those of GPUs do that add by atomics."""
    return device.type != "cpu"


def _count_overflows(replica: Replica, step: int, gradients: Averaged) -> Averaged:
    """With a loss scale ranks also tell each other whether some gradients overflowed."""
    device = replica.context.device
    replica.sums.send(
        step_checks.count_overflows(gradients, replica.engine.team_sums, replica.replicas, device)
    )
    return gradients
