"""Finds the rank that hangs: it computes far longer than ever before, or is stopped, and the others wait.

The launcher looks a few times a second at each rank's activity (`comm/liveness/activity.py`) and at the state
of its process. Slow runs, loaded machines and pauses of the launcher itself are no hangs. A rank hangs only

    - in an action of a pipeline whose usual time is known, after the first steps; never while it reads,
      saves, evaluates, or runs the user's own code;
    - after `seconds`, and ten times the longest such action. Only time in which the launcher ran too counts
      (not while the machine slept), and at least half of it must not be spent waiting for a core;
    - while the other ranks of the replica wait.

A stopped process (SIGSTOP) is reported whatever it was doing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.comm.liveness.activity import ActivitySnapshot
from meshloom.core.mesh import Mesh
from meshloom.launch.names import capital, rank_name

DEFAULT_SECONDS = 7.0
LOOK_SECONDS = 0.25  # between looks
LONGEST_GAP_SECONDS = 1.0  # between two looks; beyond that the launcher itself did not run
TIMES_LONGER = 10.0
WAITING_SECONDS = 1.0  # how long the others have waited
TIMES_TOGETHER = 0.7  # as long as one rank may hang, all of a script may wait for one another


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """The operating system's view of a process.

    state: R runnable, S sleeping, D waiting for a disk, T stopped, t held by a debugger; "" if unknown.
    starved_seconds: how long its main thread has waited for a core since its start. worked_seconds: how long all of its threads have had one.
    """

    state: str = ""
    starved_seconds: float = 0.0
    worked_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Ranks that hang, and the message about them. is_stopped: whether the process is stopped."""

    ranks: Sequence[int]
    text: str
    is_stopped: bool


@dataclass
class _Watched:
    """A rank whose state has not changed since `moved`: for how many seconds that was seen."""

    moved: float
    stopped: bool
    before: ProcessState
    seconds: float = 0.0


class HangWatch:
    """Watches the ranks of `mesh`. seconds: what an action that usually takes less than a tenth may take. scripts: ranks run a script, and may call
    different things."""

    def __init__(self, mesh: Mesh, seconds: float, *, scripts: bool = False) -> None:
        self._scripts = scripts
        self._mesh = mesh
        self._teams = mesh.teams()
        self._seconds = seconds
        self._watched: dict[int, _Watched] = {}
        self._looked: float | None = None

    def look(
        self, now: float, doing: Sequence[ActivitySnapshot | None], processes: Sequence[ProcessState]
    ) -> Hang | None:
        """The rank that hangs, if one does. now: of the monotonic clock. doing, processes: by rank."""
        gap = min(now - self._looked, LONGEST_GAP_SECONDS) if self._looked is not None else 0.0
        self._looked = now
        for rank, (snapshot, process) in enumerate(zip(doing, processes, strict=True)):
            self._note(rank, gap, snapshot, process)
        for rank in range(self._mesh.size):
            if stopped := self._stopped(rank, doing):
                return Hang(ranks=[rank], text=stopped, is_stopped=True)
            if stuck := self._stuck(rank, now, doing, processes):
                return Hang(ranks=[rank], text=stuck, is_stopped=False)
        if self._scripts and self._all_wait(doing, processes):
            text = (
                f"All ranks have waited for one another for {TIMES_TOGETHER * self._seconds:.0f} s, so they have called different things. Every rank "
                "calls the model, its state and ml.save; `if ml.main:` goes around what prints and writes, and what decides (if, break, except) must come "
                "from ml.mean. The run was ended."
            )
            return Hang(ranks=range(self._mesh.size), text=text, is_stopped=False)
        return None

    def _all_wait(self, doing: Sequence[ActivitySnapshot | None], processes: Sequence[ProcessState]) -> bool:
        """Whether they do, for so long, not counting time without a core; a rank that works meanwhile, in whichever thread, sends or adds up a large
        tensor."""
        limit = TIMES_TOGETHER * self._seconds
        for rank, (each, process) in enumerate(zip(doing, processes, strict=True)):
            if each is None or not each.waits:
                return False
            watched = self._watched[rank]
            waited = watched.seconds - (process.starved_seconds - watched.before.starved_seconds)
            if waited < limit or process.worked_seconds - watched.before.worked_seconds > waited / 4:
                return False
        return True

    def _note(self, rank: int, gap: float, snapshot: ActivitySnapshot | None, process: ProcessState) -> None:
        """Add time in the same state, or begin a new one."""
        if snapshot is None:  # it is writing, so it moves
            self._watched.pop(rank, None)
            return
        watched, stopped = self._watched.get(rank), process.state == "T"
        if watched is None or (watched.moved, watched.stopped) != (snapshot.moved, stopped):
            self._watched[rank] = _Watched(snapshot.moved, stopped, process)
        elif process.state not in ("D", "t"):
            watched.seconds += gap

    def _stopped(self, rank: int, doing: Sequence[ActivitySnapshot | None]) -> str | None:
        watched = self._watched.get(rank)
        if watched is None or not watched.stopped or watched.seconds < self._seconds:
            return None
        if all(each.stopped for each in self._watched.values()):
            return None
        name = capital(rank_name(rank, self._mesh))
        return (
            f"{name} has been stopped ({signal.SIGSTOP.name}) for {watched.seconds:.0f} s while {doing[rank]}, and the others need it. "
            "The run was ended; with --hang-seconds 0 it would have waited."
        )

    def _stuck(
        self,
        rank: int,
        now: float,
        doing: Sequence[ActivitySnapshot | None],
        processes: Sequence[ProcessState],
    ) -> str | None:
        snapshot, watched = doing[rank], self._watched.get(rank)
        if snapshot is None or watched is None or snapshot.phase != "computing":
            return None
        if snapshot.waits or not snapshot.longest_seconds:
            return None
        limit = max(self._seconds, TIMES_LONGER * snapshot.longest_seconds)
        starved = processes[rank].starved_seconds - watched.before.starved_seconds
        team = next(ranks for ranks in self._teams if rank in ranks)
        others = [doing[other] for other in team if other != rank]
        if watched.seconds < limit or watched.seconds - starved < limit / 2 or not others:
            return None
        if not all(each and each.waits and now - each.moved >= WAITING_SECONDS for each in others):
            return None
        how = {
            "R": "it is running, as in a loop without an end",
            "S": "it sleeps, as one that waits for a lock or a file",
        }
        state = f" ({how[processes[rank].state]})" if processes[rank].state in how else ""
        return (
            f"{capital(rank_name(rank, self._mesh))} has been {snapshot} for {now - snapshot.since:.0f} s{state}; it took {snapshot.longest_seconds:.2g} s "
            "at most before, and the other ranks of its replica wait for it. The run was ended; --hang-seconds SECONDS gives it longer, 0 for ever."
        )


def process_state(process: int) -> ProcessState:
    """The state of a process of this machine; unknown if it has ended, or where there is no /proc."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
        starved = int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
        worked = (int(numbers[10]) + int(numbers[11])) / os.sysconf(
            "SC_CLK_TCK"
        )  # in user code and the kernel
    except (OSError, IndexError, ValueError):
        return ProcessState()
    return ProcessState(state=state, starved_seconds=starved, worked_seconds=worked)
