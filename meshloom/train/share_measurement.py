"""Measured shares of a run with shares=measured: when they change, and how a resumed run continues with
them."""

from __future__ import annotations

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.comm.objects import agree
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.data.measured_shares import remeasure
from meshloom.data.proportion import EVERY_STEPS
from meshloom.data.shares import Record, Shares
from meshloom.replica.replica import Replica
from meshloom.telemetry.progress import Listener
from meshloom.train.local_replicas import LocalReplicas


class ShareMeasurement:
    """Of `shares`, which readers look up; all ranks create it together. simulated: simulated ranks have no
    speeds to measure."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        shares: Shares,
        replicas: LocalReplicas,
        listener: Listener,
        *,
        simulated: bool,
    ) -> None:
        self._job, self._plan, self._shares, self._replicas, self._listener = (
            job,
            plan,
            shares,
            replicas,
            listener,
        )
        self._measures = not shares.record and not simulated
        replicas.together(lambda replica: agree(replica.context.world, {"recorded_shares": shares.record}))
        if self._measures and job.batch_size < plan.dp:
            raise PlanError(
                f"A batch of {format_count(job.batch_size, 'sample')} leaves some of dp={plan.dp} replicas without any, so their speed "
                f"cannot be measured. Use dp={job.batch_size} or less, or a plan without shares=measured."
            )
        if not self._measures and not shares.record:
            listener.note(
                "shares=measured: simulated ranks have no speeds of their own, so shares stay as they are."
            )

    def go_on_with(self, checkpoint: Checkpoint) -> None:
        """Restore the checkpoint's record of shares, if they are measured over as many replicas."""
        record: Record = checkpoint.values.get("shares", ())
        if not record or self._shares.record:
            return
        dp = len(record[0][1])
        if dp == self._plan.dp:
            self._shares.add_record(record)
        else:
            self._listener.note(
                f"The shares in the checkpoint are of dp={dp} replicas, so shares begin even for dp={self._plan.dp}."
            )

    def after_step(self, next_step: int, steps: int) -> None:
        """Change the shares of later steps if that is due and pays."""
        if not self._measures or next_step % EVERY_STEPS:
            return

        def decide(replica: Replica) -> str:
            assert replica.pace
            return remeasure(replica.context, replica.pace, self._shares, self._job.batch_size, steps)

        if note := self._replicas.together(decide)[0]:
            self._listener.note(note)
