"""What a process does that was started as a server or a worker, and one that joins a run from elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

from meshloom.asynchronous.serving import ServerProcess
from meshloom.asynchronous.settings import Settings
from meshloom.asynchronous.working import WorkerProcess, ask
from meshloom.comm.keys import read_worker_key
from meshloom.errors import PlanError
from meshloom.job import Job
from meshloom.jobfile import load_job
from meshloom.launch.elastic import WORKER_KEY
from meshloom.launch.role import Role
from meshloom.launch.signals import noted_signals
from meshloom.launch.telling import tell
from meshloom.plan import Plan


def play(role: Role) -> None:
    """Be what the launcher has started this process as, until the run is over or the launcher says so."""
    with noted_signals() as signals:
        job, plan = load_job(role.target), Plan.parse(role.plan)
        assert job is not None, "the launcher has loaded it"
        if role.kind == "server":
            ServerProcess(role, job, plan, Settings.from_json(role.settings), signals, tell).run()
        else:
            _work(job, plan, role.addresses[0], role.path / WORKER_KEY, math.inf, signals)  # the launcher ends it when servers stay away


def join(job: Job, plan: Plan | None, address: str, key: Path, timeout_seconds: float) -> None:
    """Be a further worker of the run whose server 0 is at HOST:PORT. plan: what the user says it is; None: nothing.

    Raises `PlanError` or `JobError` if it is another run, `EndpointError` if the key is another's, `PeerLostError` if servers stay away so long.
    """
    with noted_signals() as signals:
        _work(job, plan, address, key, timeout_seconds, signals)


def _work(job: Job, plan: Plan | None, address: str, key: Path, timeout_seconds: float, signals: list[int]) -> None:
    worker_key = read_worker_key(key)
    description = ask(address, worker_key, timeout_seconds, signals)
    if description is None:
        return
    there = Plan.parse(description.plan)
    if plan is not None and plan != there:
        raise PlanError(f"The run at {address} has the plan {there}, and the command line says --plan {plan}. Leave it out when joining.")
    WorkerProcess(job, there, description, address, worker_key, timeout_seconds, signals, tell).run()
