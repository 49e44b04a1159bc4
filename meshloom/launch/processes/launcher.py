"""Starts the ranks of a mesh on this machine, watches them, and ends them."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshloom.core.errors import ABORTED
from meshloom.core.mesh import Mesh
from meshloom.launch.child_environment import script_environment
from meshloom.launch.environment import SCRATCH
from meshloom.launch.failure import Failure, own_line_of
from meshloom.launch.names import capital, rank_name
from meshloom.launch.processes.children import Children, rank_environments
from meshloom.launch.processes.guard import Guard
from meshloom.launch.processes.hang import DEFAULT_SECONDS, LOOK_SECONDS, HangWatch, process_state
from meshloom.launch.processes.rank_process import RankProcess
from meshloom.launch.processes.signals import ONE_REQUEST_SECONDS, noted_signals

# how long the launcher waits for the cause after a rank has reported that another one is gone
CAUSE_SECONDS = 1.5
STACK_SECONDS = 1.0  # for a rank that hangs to report its stack
GRACE_SECONDS = 2.0  # between asking ranks to end and killing them


def run_ranks(
    command: list[str], mesh: Mesh, devices: str, plan_text: str, hang_seconds: float = DEFAULT_SECONDS,
    transport: str = "auto", *, scripts: bool = False,
) -> int:  # fmt: skip
    """Run `command` once per rank, as processes of this machine, until all have ended; the exit code.

    devices: "cuda" or "cpu", by `choose_devices`; passed to ranks in their environment, with the plan.
    transport: one of `TRANSPORTS`, likewise.
    hang_seconds: how long a rank may hang before the run is ended; 0: for ever. See hang.py.
    scripts: each runs a script of the user's own, whose lines tell where ranks waited for one that failed.
    stdout is rank 0's; output of the others goes to stderr, with their rank. The first failure ends all ranks
    and is printed to stderr, once. SIGINT, SIGTERM and SIGHUP end all ranks too (130, 143, 129); ranks that
    train save first, unless a second signal arrives. No process of the ranks is left, whatever happens.
    """
    with noted_signals() as signals:
        with Guard() as guard, _Ranks(guard, scripts) as ranks:
            hang = HangWatch(mesh, hang_seconds, scripts=scripts) if hang_seconds else None
            outcome = ranks.start(command, mesh, devices, plan_text, transport, signals)
            outcome = outcome or ranks.watch(signals, hang)
            ranks.end(signals)
        if outcome.text:
            with suppress(OSError):  # the terminal is gone; there is still the exit code
                print(outcome.text, file=sys.stderr, flush=True)  # noqa: T201
        return outcome.exit_code


@dataclass(frozen=True)
class _Outcome:
    exit_code: int
    text: str = ""


def _stopped(signals: list[int]) -> _Outcome | None:
    if not signals:
        return None
    return _Outcome(128 + signals[0], f"Stopped by {signal.Signals(signals[0]).name}; all ranks have ended.")


class _Ranks:
    """The rank processes: a context manager that ends them."""

    def __init__(self, guard: Guard, scripts: bool) -> None:
        self._children = Children(guard)
        # for files that killed ranks and data workers leave behind
        self._scratch = tempfile.mkdtemp(prefix="meshloom-")
        guard.removes(Path(self._scratch).resolve())
        self._ranks = self._children.processes
        self._scripts = scripts
        self._handed_on = 0.0  # when a signal was handed on to the ranks
        self._heeded = 0  # how many signals that was

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end([])
        finally:
            self._children.close()

    def start(
        self, command: list[str], mesh: Mesh, devices: str, plan_text: str, transport: str, signals: list[int]
    ) -> _Outcome | None:
        """Start all ranks; the outcome if that was interrupted or failed."""
        self._store, environments = rank_environments(mesh, devices, plan_text, transport)
        for number, environment in enumerate(environments):
            if outcome := _stopped(signals):
                return outcome
            if self._scripts:
                environment = script_environment(environment, number, devices)
            name, prefix = rank_name(number, mesh), f"[rank {number}]" if number else None
            try:
                self._children.start(name, prefix, command, {**environment, SCRATCH: self._scratch})
            except OSError as error:
                return _Outcome(1, f"Rank {number} could not be started: {error}.")
        return None

    def watch(self, signals: list[int], hang: HangWatch | None) -> _Outcome:
        """Forward the ranks' output until all have ended, one has failed or hangs, or a signal arrives."""
        looked = time.monotonic()
        while True:
            self._children.listen(0.05)
            self._children.reap_ended()
            if outcome := self._heed(signals) or self._failed(signals):
                return outcome
            if all(rank.exit_code == 0 for rank in self._ranks):
                return _Outcome(0)
            failing = any(rank.failure for rank in self._ranks)
            if hang and not failing and time.monotonic() >= looked + LOOK_SECONDS:
                looked = time.monotonic()
                states = [process_state(rank.group) for rank in self._ranks]
                if hung := hang.look(looked, [rank.doing() for rank in self._ranks], states):
                    asked = [] if hung.is_stopped else [self._ranks[number] for number in hung.ranks]
                    return _Outcome(1, "\n".join([*self._stacks(asked), hung.text]))

    def _heed(self, signals: list[int]) -> _Outcome | None:
        """Forward a first signal if all ranks save their state; otherwise, or at a second, the run ends."""
        if not signals:
            return None
        now = time.monotonic()
        if not self._handed_on:
            if not all(rank.saves for rank in self._ranks):
                return _stopped(signals)
            for rank in self._ranks:
                rank.ask_to_stop(signals[0])
            self._handed_on = now
            name = signal.Signals(signals[0]).name
            text = f"{name}: the ranks finish their step and save; a second signal ends them at once."
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)  # noqa: T201
        if now < self._handed_on + ONE_REQUEST_SECONDS:
            self._heeded = len(signals)
        return _stopped(signals) if len(signals) > self._heeded else None

    def _stacks(self, ranks: Sequence[RankProcess]) -> list[str]:
        """The Python stacks of these ranks; of scripts, the line of their own that each has come to."""
        for rank in ranks:
            rank.ask_for_stack()
        until = time.monotonic() + STACK_SECONDS
        while ranks and time.monotonic() < until:
            self._children.listen(0.05)
        if self._scripts:
            lines = [own_line_of(rank.stack) or "a line that it has not told" for rank in ranks]
            return [f"{capital(rank.name)} waits at {line}" for rank, line in zip(ranks, lines, strict=True)]
        return [f"[{rank.name}] {line}" for rank in ranks for line in rank.stack]

    def _failed(self, signals: list[int]) -> _Outcome | None:
        if self._handed_on and any(
            rank.exit_code in (-signals[0], 128 + signals[0]) and rank.failure and not rank.reported_failure
            for rank in self._ranks
        ):
            return _stopped(signals)  # its training had just ended
        in_order = sorted(self._ranks, key=lambda rank: rank.failed_at)
        failures = [(rank.failed_at, rank.failure) for rank in in_order if rank.failure]
        for noticed, failure in failures:
            if not failure.consequence:
                if self._scripts and time.monotonic() < noticed + CAUSE_SECONDS and self._may_tell():
                    return None
                return _Outcome(
                    failure.exit_code, "\n".join([str(failure), *self._elsewhere(failure, failures)])
                )
        gone = [rank for rank in self._ranks if rank.exit_code == 0]
        who = capital(gone[0].name) if gone else ""
        if gone and not gone[0].joined and any(rank.joining and not rank.joined for rank in self._ranks):
            return _Outcome(1, f"{who} ended before it joined the others, which wait for it.")
        if not failures or time.monotonic() < failures[0][0] + CAUSE_SECONDS:
            return None
        # the rank whose timeout expired has aborted; the others report only that
        _, first = min(failures, key=lambda each: ABORTED in each[1].message)
        if gone:
            together = f"while {first.who} was still working together with it: {first.message}"
            return _Outcome(1, f"{who} ended without an error {together}")
        return _Outcome(first.exit_code, "\n".join([str(first), *self._still_at_work()]))

    def _may_tell(self) -> bool:
        """Whether a rank that had joined may still tell at which line it waited."""
        return any(rank.joined and rank.failure is None and rank.exit_code is None for rank in self._ranks)

    def _elsewhere(self, first: Failure, failures: Sequence[tuple[float, Failure]]) -> list[str]:
        """Where the others were, in a script's lines."""
        found: list[str] = []
        for _, each in failures if self._scripts else ():
            if each.line and (each.consequence or each.line != first.line):
                how = "waited for it at" if each.consequence else "had come to"
                found.append(f"{capital(each.who)} {how} {each.line.splitlines()[-1]}")
        return found[:3]

    def _still_at_work(self) -> list[str]:
        """The ranks that compute, for which the others waited until their timeouts expired."""
        busy: list[str] = []
        for rank in self._ranks:
            if rank.joined and rank.failure is None and rank.exit_code is None:
                snapshot = rank.doing()
                if snapshot and not snapshot.waits:
                    busy.append(f"{capital(rank.name)} is still {snapshot}.")
        return [f"  {' '.join(busy[:3])}"] if busy else []

    def end(self, signals: list[int]) -> None:
        """End all processes: SIGTERM, wait a little (not after a second signal), SIGKILL. Ranks that would
        save on SIGTERM are killed directly."""
        for rank in self._ranks:
            rank.send(signal.SIGKILL if rank.saves else signal.SIGTERM)
            rank.send(signal.SIGCONT)  # a stopped process does not handle signals
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and len(signals) < 2:
            if all(rank.exit_code is not None for rank in self._ranks):
                break
            self._children.listen(0.02)
            self._children.reap_ended()
        self._children.kill()
