"""The command line's options for asynchronous plans: their definitions, checks and values."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshloom.asynchronous.protocol.circumstances import Circumstances, parse_incidents
from meshloom.asynchronous.state.settings import DEFAULT_LISTEN, DEFAULT_SNAPSHOT_EVERY, AsynchronousSettings
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan

_OF_ASYNC = ("snapshot_every", "listen", "step_seconds", "latency_seconds", "incidents")
_OF_A_RUN = ("steps", "out", "resume", "overwrite", "json", *_OF_ASYNC)


def add_asynchronous(train: argparse.ArgumentParser) -> None:
    """Add the options to `meshloom train`."""
    train.add_argument(
        "--snapshot-every", type=int, metavar="N",
        help=f"exchange=async: updates between the servers' snapshots, to which all go back when one is killed (default: {DEFAULT_SNAPSHOT_EVERY})",
    )  # fmt: skip
    train.add_argument(
        "--listen", metavar="HOST:PORT",
        help=f"exchange=async on processes: where server 0 listens, and at the ports after it the others; port 0: any (default: {DEFAULT_LISTEN})",
    )  # fmt: skip
    train.add_argument(
        "--join", metavar="HOST:PORT",
        help="be a further worker of the asynchronous run whose server 0 listens there",
    )  # fmt: skip
    train.add_argument("--key", metavar="FILE", help="with --join: the key file that the run has printed")
    train.add_argument(
        "--step-seconds", metavar="LIST",
        help="exchange=async on a virtual clock: seconds that each worker needs for a share, like 1,1,1,3 (default: 1)",
    )  # fmt: skip
    train.add_argument(
        "--latency-seconds", type=float, metavar="S",
        help="exchange=async on a virtual clock: seconds of every message (default: 0)",
    )  # fmt: skip
    train.add_argument(
        "--incidents", metavar="LIST",
        help="exchange=async on a virtual clock: who is killed, joins or leaves when, like kill:2@10+join:2@15+leave:1@20+server:0@30/5",
    )  # fmt: skip


def check_asynchronous(arguments: argparse.Namespace, plan: Plan) -> None:
    """Raise `PlanError` for options that would have no effect."""
    if arguments.join is not None:
        if arguments.key is None:
            raise PlanError("--join needs --key FILE, the key file that the run has printed when it started.")
        for name in _OF_A_RUN:
            if getattr(arguments, name) is not None:
                raise PlanError(
                    f"{_flag(name)} is for the run itself, and --join takes part in a running one. Leave {_flag(name)} out."
                )
        return
    if arguments.key is not None:
        raise PlanError("--key is for --join HOST:PORT. Leave it out, or say which run to join.")
    if plan.synchronous:
        for name in _OF_ASYNC:
            if getattr(arguments, name) is not None:
                raise PlanError(f"{_flag(name)} is for exchange=async, and the plan is {plan}. Leave it out.")
    simulated = arguments.devices.startswith("simulated")
    if arguments.listen is not None and (simulated or circumstances_of(arguments) is not None):
        raise PlanError(
            "--listen is for processes, and this run is simulated. Leave it out, or use --devices cpu."
        )


def circumstances_of(arguments: argparse.Namespace) -> Circumstances | None:
    """The options of the virtual clock; None: none is given."""
    if arguments.step_seconds is None and arguments.latency_seconds is None and arguments.incidents is None:
        return None
    said = arguments.step_seconds.split(",") if arguments.step_seconds else ()
    try:
        step_seconds = tuple(float(each) for each in said)
    except ValueError:
        raise PlanError(
            f"--step-seconds {arguments.step_seconds} must be seconds joined by commas, like 1,1,1,3."
        ) from None
    return Circumstances(
        step_seconds=step_seconds,
        latency_seconds=arguments.latency_seconds or 0.0,
        incidents=parse_incidents(arguments.incidents) if arguments.incidents else (),
    )


def settings_of(arguments: argparse.Namespace, job: Job) -> AsynchronousSettings:
    """The settings of a run on processes."""
    every = arguments.snapshot_every
    return AsynchronousSettings(
        steps=arguments.steps if arguments.steps is not None else job.steps,
        out=Path(arguments.out) if arguments.out is not None else None,
        resume=Path(arguments.resume) if arguments.resume is not None else None,
        overwrite=bool(arguments.overwrite),
        snapshot_every=every if every is not None else DEFAULT_SNAPSHOT_EVERY,
        circumstances=circumstances_of(arguments) or Circumstances(),
        listen=arguments.listen if arguments.listen is not None else DEFAULT_LISTEN,
        timeout_seconds=arguments.timeout,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
