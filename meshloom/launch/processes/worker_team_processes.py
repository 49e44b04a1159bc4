"""The rank processes of one worker of an asynchronous run, which start and end together.

    launcher of the run  ----  this process  ----  rank 0   communicates with servers, and reports
                                             ----  rank 1   ...

When one of them is killed the others end too: the worker is lost, the run goes on. When one fails, that is
reported to the run's launcher.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

from meshloom.core.mesh import Mesh
from meshloom.launch.environment import with_role
from meshloom.launch.events import send_event
from meshloom.launch.failure import EndedError
from meshloom.launch.names import rank_name
from meshloom.launch.processes.children import Children, rank_environments
from meshloom.launch.processes.guard import Guard
from meshloom.launch.processes.launcher import CAUSE_SECONDS
from meshloom.launch.processes.rank_process import RankProcess
from meshloom.launch.role import Role


def run_team(command: Sequence[str], role: Role, mesh: Mesh, plan_text: str, signals: Sequence[int]) -> None:
    """Start a process for each rank of `mesh`, and wait until all have ended.

    role: this worker's, which each rank gets with its number. plan_text: of the worker's ranks.
    signals: after the first the worker leaves when its share is pushed; the second ends it immediately.
    Raises `EndedError` when a rank was killed or has failed.
    """
    with _Team() as team:
        team.start(command, role, mesh, plan_text)
        team.watch(signals)


class _Team:
    """The rank processes: a context manager that ends them."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> _Team:
        self._children = Children(self._stack.enter_context(Guard()))
        self._stack.callback(self._children.close)
        self._ranks = self._children.processes
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, command: Sequence[str], role: Role, mesh: Mesh, plan_text: str) -> None:
        """Start a process for each rank; they meet in a store of this process."""
        self._store, environments = rank_environments(mesh, "cpu", plan_text)
        for number, environment in enumerate(environments):
            mine = with_role(environment, replace(role, rank=number))
            self._children.start(rank_name(number, mesh), None, command, mine)

    def watch(self, signals: Sequence[int]) -> None:
        """Forward rank 0's reports until all have ended."""
        leaving = False
        while any(rank.exit_code is None for rank in self._ranks):
            self._children.listen(0.05)
            self._children.reap_ended()
            self._pass_on()
            failures = [rank for rank in self._ranks if rank.failure]
            if failures:
                self._end(failures[0])
            if len(signals) > 1:
                return
            if signals and not leaving:
                leaving = True
                self._ranks[0].send(signal.SIGTERM)

    def _pass_on(self) -> None:
        events = self._ranks[0].events
        for event in events:
            send_event(event)
            if event["event"] == "number":  # it was admitted
                send_event({"event": "joined"})
        events.clear()

    def _end(self, first: RankProcess) -> None:
        """Report the reason, once: the cause if it is reported soon, else what was noticed first."""
        cause = first
        for _ in range(round(CAUSE_SECONDS / 0.05) + 1):
            causes = [rank for rank in self._ranks if rank.failure and not rank.failure.consequence]
            if causes:
                cause = causes[0]
                break
            self._children.listen(0.05)
            self._children.reap_ended()
        failure = cause.failure
        assert failure is not None
        if failure.kind and not failure.consequence:
            send_event({"event": "failed", **asdict(failure)})
            raise EndedError(str(failure), failure.exit_code)
        killed = (cause.exit_code or 0) < 0
        how = "has lost another one" if failure.consequence and not killed else cause.how_it_ended
        raise EndedError(f"{cause.name} of this worker {how}, so the worker ends.", 1)
