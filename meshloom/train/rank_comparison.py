"""Comparisons of what ranks must have alike, before a run's first step and after some: the data, the settings of optimizers, the bits
of replicas, and of the ranks of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any

from meshloom.comm.objects import collect
from meshloom.core.cache import digest_of
from meshloom.core.errors import CODE_ERRORS, JobError
from meshloom.core.job import Job
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.data.map_data import EVALUATION
from meshloom.data.samples import SomeSamples, some_samples
from meshloom.exchange.local_sgd import within_round
from meshloom.launch.names import rank_name
from meshloom.program.store.object_text import NoTextError, ObjectText
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import check_identical, check_team, settle
from meshloom.replica.step_checks import check_groups
from meshloom.train.local_replicas import LocalReplicas
from meshloom.train.step_meter import StepMeter

CHECK_EVERY = 100  # steps between comparisons; the first is after the run's first step


class RankComparison:
    """Of a run under `plan`. due: after so many steps something is compared next, beside the last; infinite where who observes every
    step compares by itself."""

    def __init__(self, plan: Plan, replicas: LocalReplicas) -> None:
        self._plan, self._replicas = plan, replicas
        self.due: float = 0
        self._has_read = False
        self._compare_groups("At the start")

    def read_data(self, job: Job) -> list[str]:
        """Compare the length and some samples of the job's data, and of what it evaluates, between the ranks that read, once; returns
        notes for the user. Raises `JobError` for other data."""
        builds = [("Job(data=...)", job.data, 0)]
        builds += [("Evaluate(data=...)", job.evaluate.data, EVALUATION)] if job.evaluate else []
        notes: list[str] = []
        for where, build, epoch in builds if self._plan.mesh.size > 1 and not self._has_read else ():
            read = partial(some_samples, build, job, where, sample_digest, epoch=epoch)
            notes += self._replicas.together(partial(_read_alike, read=read, where=where))[0]
        self._has_read = True
        return notes

    def after_step(self, done: int, steps: int, meter: StepMeter) -> None:
        """Compare what is due after `done` of `steps` steps. Raises `TrainingError` for what differs."""
        plan, replicas, last = self._plan, self._replicas, done == steps
        if last:
            replicas.together(settle)
        if self.due == math.inf:
            return
        adapt = replicas.first.exchange.ownership.independent  # rates of their own
        if done % CHECK_EVERY == 0 and not adapt:
            self._compare_groups(f"After step {done - 1}")
        if done >= self.due or last:
            settled = within_round(replicas.first.exchange) is None
            if plan.dp > 1 and settled:
                replicas.together(lambda replica: check_identical(replica, done - 1))
                meter.checks += 1
            self.due = CHECK_EVERY * (done // CHECK_EVERY + 1) if plan.dp == 1 or settled else done + 1
        if (done % CHECK_EVERY == 0 or last or meter.num_steps == 0) and plan.mesh.size > plan.dp:
            replicas.together(lambda replica: check_team(replica, done - 1))

    def _compare_groups(self, when: str) -> None:
        def compare(replica: Replica) -> None:
            check_groups(replica.updater, replica.context.world, self._plan.mesh, when)

        if self._plan.mesh.size > 1:
            self._replicas.together(compare)


def _read_alike(replica: Replica, read: Callable[[], SomeSamples | None], where: str) -> list[str]:
    """By the ranks that read, and beside a single one by the next, whose number is another."""
    team, mine = replica.context.team, None
    if team is None or team.rank == 0:
        mine = read()
    elif replica.plan.dp == 1 and team.rank == 1:
        with suppress(*CODE_ERRORS):  # it need not be able to read
            mine = read()
    everyone = collect(replica.context.world, None if mine is None else vars(mine))
    have = {rank: SomeSamples(**theirs) for rank, theirs in enumerate(everyone) if theirs is not None}
    return compare_samples(have, replica.plan.mesh, where)


def compare_samples(read: Mapping[int, SomeSamples], mesh: Mesh, where: str) -> list[str]:
    """Notes on samples that could not be compared. read: by rank. Raises `JobError` for data that differs between ranks."""
    if len(read) < 2:
        return []
    samples = [(name, made, again) for each in read.values() for name, (made, again) in each.samples.items()]
    unstable = {name for name, made, again in samples if made != again}
    unknown = {made for _, made, _ in samples if made.startswith(_UNKNOWN)}
    (first, one), *others = read.items()
    for rank, other in others:
        if found := _difference(one, other, unstable):
            raise JobError(
                f"{where} gives {found[0]} on {rank_name(first, mesh)} and {found[1]} on {rank_name(rank, mesh)}. Build the whole data set on every rank: meshloom "
                "gives each its own samples. Do not split it by rank (RANK, torch.distributed.get_rank()), and let nothing in it depend on the process."
            )
    notes = [
        f"{where}: samples were not compared between ranks: {each.removeprefix(_UNKNOWN)} cannot be."
        for each in sorted(unknown)
    ]
    if unstable:
        notes.append(
            f"{where}: sample {', '.join(sorted(unstable))} differs from itself when it is read twice, so it was not compared between ranks. Draws of torch, "
            "random and numpy are seeded for every sample; what else it depends on is not."
        )
    return notes


def _difference(one: SomeSamples, other: SomeSamples, unstable: Set[str]) -> tuple[str, str] | None:
    """What each of two ranks is given; None: the same, as far as it is compared."""
    if one.length != other.length:
        here, there = (
            "a stream" if each.length is None else f"{each.length} samples" for each in (one, other)
        )
        return here, there
    if one.is_whole and other.is_whole and one.samples.keys() != other.samples.keys():
        return f"{len(one.samples)} samples at first", f"{len(other.samples)}"
    for name, (made, _) in one.samples.items():
        if name not in unstable and made != other.samples.get(name, [made])[0]:
            return f"one sample {name}", "another one"
    return None


def sample_digest(sample: Any) -> str:
    """A digest of a sample, for `SomeSamples`."""
    try:
        return digest_of(ObjectText().of(sample, "a sample"))
    except NoTextError as error:
        return f"{_UNKNOWN}{error.what.rstrip(',')}"


_UNKNOWN = "unknown: "  # in place of the digest of what has none
