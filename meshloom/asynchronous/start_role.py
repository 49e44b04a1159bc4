"""Runs a process as the server or worker that it was started as, or as a worker that joins a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.asynchronous.messaging.handshake import RunDescription
from meshloom.asynchronous.roles.server_process import ServerProcess
from meshloom.asynchronous.roles.worker_process import WorkerProcess, ask
from meshloom.asynchronous.state.settings import AsynchronousSettings, inner_plan
from meshloom.comm.messaging.keys import read_worker_key
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job
from meshloom.core.plan import Plan
from meshloom.launch.allocator import keep_freed_memory
from meshloom.launch.events import send_event
from meshloom.launch.processes.signals import noted_signals
from meshloom.launch.processes.worker_team_processes import run_team
from meshloom.launch.role import Role

if TYPE_CHECKING:
    from meshloom.asynchronous.state.worker_replica import WorkerReplica

_FOR_EVER_SECONDS = 1e7  # how long a rank waits for its worker's next share


def play(role: Role) -> None:
    """Run as the launcher's role for this process, until the run is over or the launcher ends it."""
    keep_freed_memory()
    with noted_signals() as signals, as_program(role.target, role.words):
        job, plan = load_job(role.target), Plan.parse(role.plan)
        assert job is not None, "the launcher has loaded it"
        if role.kind == "server":
            settings = AsynchronousSettings.from_json(role.settings)
            ServerProcess(role, job, plan, settings, signals, send_event).run()
        elif role.rank is None:
            _work(role, job, None, signals)
        else:
            _be_rank(role, job, plan, signals)


def join(
    job: Job,
    target: str,
    words: tuple[str, ...],
    plan: Plan | None,
    address: str,
    key: Path,
    timeout_seconds: float,
) -> None:
    """Be a further worker of the run whose server 0 is at HOST:PORT.

    target, words: the job's FILE.py:NAME, and its sys.argv after its name.
    plan: the one that the user expects; None: any.
    Raises `PlanError` or `JobError` if it is another run, `EndpointError` if the key is another's,
    `PeerLostError` if servers stay away so long.
    """
    role = Role(
        kind="worker", target=target, words=words, plan="", settings="", number=0, start=1,
        directory=str(key.parent), addresses=(address,), head="", key=str(key),
        timeout_seconds=timeout_seconds,
    )  # fmt: skip
    keep_freed_memory()
    with noted_signals() as signals:
        _work(role, job, plan, signals)


def _work(role: Role, job: Job, plan: Plan | None, signals: list[int]) -> None:
    """Run as a worker, or start its ranks if it has several. plan: as for `join`."""
    description = _ask(role, signals)
    if description is None:
        return
    there = Plan.parse(description.plan)
    if plan is not None and plan != there:
        raise PlanError(
            f"The run at {role.addresses[0]} has the plan {there}, and the command line says --plan {plan}. Leave it out when joining."
        )
    inner = inner_plan(there)
    if inner.mesh.size > 1:
        command = [sys.executable, "-m", "meshloom.asynchronous", role.directory]
        run_team(command, replace(role, plan=str(there)), inner.mesh, str(inner), signals)
    else:
        from meshloom.asynchronous.state.worker_replica import worker_replica_here

        replica = worker_replica_here(job, there)
        try:
            _worker(role, job, there, description, signals, replica).run()
        finally:
            replica.close()


def _be_rank(role: Role, job: Job, plan: Plan, signals: list[int]) -> None:
    """Run as one of several ranks of a worker: the first is the worker, the others follow its commands."""
    from meshloom.asynchronous.state.worker_replica import WorkerReplica
    from meshloom.launch.opening import open_world

    with open_world(inner_plan(plan).mesh, "cpu", _FOR_EVER_SECONDS) as world:
        replica = WorkerReplica(job, plan, world, None)
        if not world.main:
            replica.follow()
        elif (description := _ask(role, signals)) is not None:
            _worker(role, job, plan, description, signals, replica).run()
        replica.close()


def _worker(
    role: Role, job: Job, plan: Plan, description: RunDescription, signals: list[int], replica: WorkerReplica
) -> WorkerProcess:
    key = read_worker_key(Path(role.key))
    return WorkerProcess(
        job, plan, description, role.addresses[0], key, role.timeout_seconds, signals, send_event, replica
    )


def _ask(role: Role, signals: list[int]) -> RunDescription | None:
    """The run's description; None if a signal came first."""
    return ask(role.addresses[0], read_worker_key(Path(role.key)), role.timeout_seconds, signals)
