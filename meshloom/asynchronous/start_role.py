"""Runs a process as the server or worker that it was started as, or as a worker that joins a run."""

from __future__ import annotations

from pathlib import Path

from meshloom.asynchronous.roles.server_process import ServerProcess
from meshloom.asynchronous.roles.worker_process import WorkerProcess, ask
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.comm.messaging.keys import read_worker_key
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job
from meshloom.core.plan import Plan
from meshloom.launch.allocator import keep_freed_memory
from meshloom.launch.events import send_event
from meshloom.launch.processes.signals import noted_signals
from meshloom.launch.role import Role


def play(role: Role) -> None:
    """Run as the launcher's role for this process, until the run is over or the launcher ends it."""
    keep_freed_memory()
    with noted_signals() as signals, as_program(role.target, role.words):
        job = load_job(role.target)
        assert job is not None, "the launcher has loaded it"
        if role.kind == "server":
            plan, settings = Plan.parse(role.plan), AsynchronousSettings.from_json(role.settings)
            ServerProcess(role, job, plan, settings, signals, send_event).run()
        else:
            _work(role, job, None, signals)


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
        kind="worker", target=target, words=words, plan="", settings="", number=0,
        directory=str(key.parent), addresses=(address,), head="", key=str(key),
        timeout_seconds=timeout_seconds,
    )  # fmt: skip
    keep_freed_memory()
    with noted_signals() as signals:
        _work(role, job, plan, signals)


def _work(role: Role, job: Job, plan: Plan | None, signals: list[int]) -> None:
    """Run as a worker. plan: as for `join`."""
    from meshloom.asynchronous.state.worker_replica import WorkerReplica  # servers do without

    address, key = role.addresses[0], read_worker_key(Path(role.key))
    description = ask(address, key, role.timeout_seconds, signals)
    if description is None:  # a signal came first
        return
    there = Plan.parse(description.plan)
    if plan is not None and plan != there:
        raise PlanError(
            f"The run at {address} has the plan {there}, and the command line says --plan {plan}. Leave it out when joining."
        )
    replica = WorkerReplica(job, there)
    try:
        WorkerProcess(
            job, there, description, address, key, role.timeout_seconds, signals, send_event, replica
        ).run()
    finally:
        replica.close()
