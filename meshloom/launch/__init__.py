"""Puts ranks on devices: starts rank processes, joins those that others started, or keeps all ranks in this process.

    meshloom train FILE        choose_devices -> run_ranks ----starts----> N times the same command, each is_rank()
    torchrun / srun / k8s      ------------------------------starts----->  N times the same command, each is_rank()
                                                                                |
    python FILE, simulated     ----------------------------------------->  open_world -> World

While `run_ranks` runs there are the launcher, N ranks, each the leader of a session (and so of a process group, to which its data workers
belong), and a guard: a few lines of Python that hold a pipe from the launcher and kill the groups when it closes, because a
launcher that is killed with -9 cannot. Each rank holds a pipe to the launcher, on which it says that it is joining, has
joined, or has failed and why; what it is doing it writes to a page of memory that the launcher can read (`comm/liveness/activity.py`).
The store in which ranks meet is the launcher's, on a port that the kernel picked.

    wording.py       how ranks and counts are written          opening.py       open_world: which of the next two
    environment.py   what a process was told; alone reads it   joining.py       a rank of several processes, and its parting
    devices.py       the choice of devices and its reason      one_process.py   all ranks in this process
    world.py         LocalRank, World: what is opened          failure.py       what ended a process, in one message
    launcher.py      run_ranks: starts, watches, ends          telling.py       a rank's line to its launcher
    rank_process.py  one rank, as the launcher sees it         guard.py         the process that outlives a killed launcher
    hang.py          which rank hangs, if one does             transport.py     what ranks talk through, and why
    connecting.py    the groups of a rank                      signals.py       signals that are noted
    children.py      processes started here: heard, ended      allocator.py     freed memory is kept for the next step

An asynchronous plan has servers and workers in the place of ranks: elastic.py starts them, and servers again; team.py starts the
ranks of a worker that is several; role.py is what each is told.
"""

from __future__ import annotations

from meshloom.launch.devices import DEVICES, Kind, check_ranks, choose_devices, choose_for_workers, default_ranks
from meshloom.launch.environment import cache_directory, is_first_rank, is_rank, launched_plan, launched_role, launching_seconds
from meshloom.launch.events import tell
from meshloom.launch.failure import leave, report_failure, report_stop
from meshloom.launch.opening import check_timeout, open_world
from meshloom.launch.processes.launcher import run_ranks
from meshloom.launch.processes.signals import StopRequests
from meshloom.launch.world import LocalRank, World
from meshloom.machine.cores import cores

__all__ = [
    "DEVICES",
    "Kind",
    "LocalRank",
    "StopRequests",
    "World",
    "cache_directory",
    "check_ranks",
    "check_timeout",
    "choose_devices",
    "choose_for_workers",
    "cores",
    "default_ranks",
    "is_first_rank",
    "is_rank",
    "launched_plan",
    "launched_role",
    "launching_seconds",
    "leave",
    "open_world",
    "report_failure",
    "report_stop",
    "run_ranks",
    "tell",
]
