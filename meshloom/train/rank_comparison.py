"""Comparisons of what ranks hold alike, before a run's first step and after some: the settings of optimizers, the bits of replicas, and
of the ranks of each."""

from __future__ import annotations

from meshloom.comm.steps import Steps
from meshloom.core.plan import Plan
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import check_identical, check_team, settle
from meshloom.replica.step_checks import check_groups
from meshloom.train.local_replicas import LocalReplicas
from meshloom.train.step_meter import StepMeter

CHECK_EVERY = 100  # steps between comparisons; the first is after the run's first step


class RankComparison:
    """Of a run under `plan`. is_on: False where who observes every step compares by itself."""

    def __init__(self, plan: Plan, replicas: LocalReplicas) -> None:
        self._plan, self._replicas = plan, replicas
        self._checked = -1  # the step after which replicas were compared
        self.is_on = True
        self._compare_groups("At the start")

    def after_step(self, done: int, steps: int, meter: StepMeter) -> None:
        """Compare what is due after `done` of `steps` steps. Raises `TrainingError` for what differs."""
        plan, replicas, last = self._plan, self._replicas, done == steps
        if last:
            replicas.together(settle)
        if not self.is_on:
            return
        if done % CHECK_EVERY == 0 and not replicas.first.exchange.independent:  # which may adapt their own
            self._compare_groups(f"After step {done - 1}")
        due = done // CHECK_EVERY > self._checked // CHECK_EVERY or last
        if plan.dp > 1 and due and replicas.first.exchange.settled:
            replicas.together(lambda replica: check_identical(replica, done - 1))
            meter.checks += 1
            self._checked = done
        if plan.mesh.size > plan.dp and (done % CHECK_EVERY == 0 or last or meter.num_steps == 0):
            replicas.together(lambda replica: check_team(replica, done - 1))

    def _compare_groups(self, when: str) -> None:
        def compare(replica: Replica) -> Steps[None]:
            yield from check_groups(replica.updater, replica.context.world, self._plan.mesh, when)

        if self._plan.mesh.size > 1:
            self._replicas.together(compare)
