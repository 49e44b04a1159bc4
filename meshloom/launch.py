"""Puts ranks on devices: starts rank processes, joins those that others started, or keeps all ranks in this process.

    meshloom train FILE        choose_devices -> run_ranks ----starts----> N times the same command, each is_rank()
    torchrun / srun / k8s      ------------------------------starts----->  N times the same command, each is_rank()
                                                                                |
    python FILE, simulated     ----------------------------------------->  open_world -> World

Only this file reads the environment.

While `run_ranks` runs there are the launcher, N ranks, each the leader of a session (and so of a process group, to which its data workers
belong), and a guard: a few lines of Python that hold a pipe from the launcher and kill the groups when it closes, because a
launcher that is killed with -9 cannot. Each rank holds a pipe to the launcher, on which it says that it is joining, has
joined, or has failed and why. The store in which ranks meet is the launcher's, on a port that the kernel picked.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshloom.comm.c10d import C10dGroup
from meshloom.comm.group import Group
from meshloom.comm.record import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import Turns
from meshloom.errors import DeviceError, MeshloomError, PeerLostError, PlanError
from meshloom.mesh import AXES, Axis, Mesh, Place
from meshloom.plan import Plan

Kind = Literal["cuda", "cpu", "simulated"]
DEVICES = ("auto", "cuda", "cpu", "simulated", "simulated:cuda")

FAREWELL_SECONDS = 5.0  # how long a rank that is done waits for the others before its connections close
CAUSE_SECONDS = 1.5  # how long the launcher waits for the cause, once a rank has reported that another one is gone
GRACE_SECONDS = 2.0  # between asking ranks to end and killing them


# --- The world: what a training loop is given.


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """A rank that lives in this process.

    groups: by axis, the ranks that differ from this one along that axis only.
    statistics: the ranks of `groups["dp"]` on a communicator of its own, for batch statistics in the middle of forward and backward.
    world: all ranks, for control messages on the CPU; not counted.
    """

    rank: int
    place: Place
    device: torch.device
    groups: Mapping[Axis, RecordedGroup]
    statistics: RecordedGroup
    world: Group


class World:
    """The ranks of a mesh, as seen by one process: a context manager that ends what it made.

    local: the ranks that live here: one in a rank process, all when simulated.
    kind, why: the devices, and the line that explains them.
    turns: how ranks of one process wait for each other.
    """

    def __init__(self, mesh: Mesh, local: list[LocalRank], kind: Kind, why: str, turns: Turns, end: Callable[[bool], None] | None = None) -> None:
        self.mesh = mesh
        self.local = local
        self.kind: Kind = kind
        self.why = why
        self.turns = turns
        self._end = end

    @property
    def main(self) -> bool:
        """Whether rank 0 lives here."""
        return self.local[0].rank == 0

    def memory_bytes(self) -> int:
        """Most memory that this process has used so far: of its GPU if its ranks are on one, else resident."""
        device = self.local[0].device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def close(self) -> None:
        """Part from the other ranks after a run that went well. A second time does nothing."""
        end, self._end = self._end, None
        if end:
            end(True)

    def abort(self) -> None:
        """Leave at once: whatever the other ranks are doing together with this one fails there."""
        end, self._end = self._end, None
        if end:
            end(False)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


def open_world(mesh: Mesh, devices: str = "auto", timeout_seconds: float = 600.0) -> World:
    """Join the other processes if this one was started as a rank; otherwise keep all ranks in this process.

    devices: one of `DEVICES`.
    timeout_seconds: how long a rank waits for the others, in joining and in every collective, before it gives up.
    Raises `PlanError` if the mesh has another size than there are processes, `DeviceError` if the devices are not there.
    """
    _check_devices(devices)
    seat = _seat(os.environ)
    size = seat.size if seat else 1
    if size > 1 and devices.startswith("simulated"):
        raise DeviceError(f"devices={devices} keeps all ranks in one process, but {size} processes were started. Start one, or use devices=cpu.")
    if seat and mesh.size != size:
        started = "1 process was" if size == 1 else f"{size} processes were"
        raise PlanError(
            f"The plan needs {_ranks(mesh.size)} ({_sizes(mesh)}), but {started} started. "
            f"Start {mesh.size} (torchrun --nproc-per-node {mesh.size} on one machine), or use a plan of {size}, like dp={size}."
        )
    if seat and size > 1:
        return _join(mesh, seat, devices, timedelta(seconds=timeout_seconds))
    return _within_this_process(mesh, devices)


def _within_this_process(mesh: Mesh, devices: str) -> World:
    num_gpus = torch.cuda.device_count()
    if "cuda" in devices and not num_gpus:
        raise DeviceError(f"devices={devices} needs a GPU, and none is visible. Use devices={'simulated' if ':' in devices else 'cpu'}.")
    on_gpus = "cuda" in devices or (devices == "auto" and mesh.size == 1 and num_gpus > 0)
    where = [torch.device("cuda", rank % num_gpus) if on_gpus else torch.device("cpu") for rank in range(mesh.size)]
    asked = "asked for"
    if mesh.size == 1 and not devices.startswith("simulated"):
        kind: Kind = "cuda" if on_gpus else "cpu"
        reason = asked if devices != "auto" else _gpus(num_gpus)
    else:
        kind = "simulated"
        reason = asked if devices.startswith("simulated") else f"this process was not started as one of {mesh.size}"
    used = f"{min(num_gpus, mesh.size)} GPU{'s' * (min(num_gpus, mesh.size) > 1)}" if on_gpus else _threads(torch.get_num_threads())
    why = f"{kind}: {_ranks(mesh.size)} in this process on {used} ({reason})"

    turns = Turns()
    everyone = simulated_groups(mesh.size, turns)
    groups: dict[tuple[Axis, int], Group] = {}
    statistics: dict[int, Group] = {}
    for axis in _axes(mesh):
        for members in mesh.groups(axis):
            groups.update(zip([(axis, rank) for rank in members], simulated_groups(len(members), turns), strict=True))
    for members in mesh.groups("dp"):
        statistics.update(zip(members, simulated_groups(len(members), turns), strict=True))
    local = [
        LocalRank(
            rank=rank,
            place=mesh.place(rank),
            device=where[rank],
            groups={axis: RecordedGroup(groups[axis, rank], axis) for axis in _axes(mesh)},
            statistics=RecordedGroup(statistics[rank], "dp"),
            world=everyone[rank],
        )
        for rank in range(mesh.size)
    ]
    return World(mesh, local, kind, why, turns)


def _join(mesh: Mesh, seat: _Seat, devices: str, timeout: timedelta) -> World:
    _tell({"event": "joining"})
    try:
        ours = not dist.is_initialized()  # otherwise the user's own script has done that
        store = _meeting_place(seat, timeout) if ours else dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        # Ranks may open several worlds, one after another; each has its own part of the store.
        opened = store.add(f"meshloom/opened/{seat.rank}", 1)
        store = dist.PrefixStore(f"meshloom/{opened}", store)
        store.set_timeout(timeout)
        kind, device, reason = _agreed_device(seat, devices, store)
        both = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if ours:
            dist.init_process_group(both, store=dist.PrefixStore("world", store), rank=seat.rank, world_size=seat.size, timeout=timeout)
        made: list[dist.ProcessGroup] = []

        def connect(members: Iterable[tuple[int, ...]], backend: str) -> Group:
            """Make a group of each of `members`, which all ranks do together; the one that this rank is in."""
            mine: Group | None = None
            for ranks in members:
                process_group = dist.new_group(list(ranks), timeout, backend)
                if seat.rank in ranks:
                    assert isinstance(process_group, dist.ProcessGroup)
                    made.append(process_group)
                    mine = C10dGroup(process_group, [_name(rank, mesh) for rank in ranks], device if "nccl" in backend else None)
            assert mine
            return mine

        local = LocalRank(
            rank=seat.rank,
            place=mesh.place(seat.rank),
            device=device,
            groups={axis: RecordedGroup(connect(mesh.groups(axis), both), axis) for axis in _axes(mesh)},
            statistics=RecordedGroup(connect(mesh.groups("dp"), both), "dp"),
            world=connect([tuple(range(mesh.size))], "gloo"),
        )
    except (RuntimeError, OSError) as error:
        how = " ".join(str(error).split())[:300]
        raise PeerLostError(
            f"{_name(seat.rank, mesh)} could not join the other {seat.size - 1} ranks at {seat.address}:{seat.port}: {how}"
        ) from error
    if kind == "cuda":
        torch.cuda.set_device(device)
        used = "one GPU each"
    else:
        used = f"{_threads(torch.get_num_threads())} each"
    here = f"{seat.local_size} on each machine's" if seat.local_size < seat.size else "on"
    why = f"{kind}: {_ranks(seat.size)} as processes {here} {_cores()} cores, {used} ({reason})"
    _tell({"event": "joined"})
    return World(mesh, [local], kind, why, Turns(), _parting(mesh, local, store, made, ours))


def _parting(mesh: Mesh, local: LocalRank, store: dist.Store, made: list[dist.ProcessGroup], ours: bool) -> Callable[[bool], None]:
    """What ends a rank's world, and until then reports what the user's script does not catch."""
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        leave(report_failure(error, mesh))

    def end(well: bool) -> None:
        atexit.unregister(at_exit)
        if well and sys.excepthook is uncaught:  # after a failure the error is still on its way up
            sys.excepthook = previous
        if well and _meet_again(local.rank, mesh.size, store):
            for process_group in [None] if ours else made:
                dist.destroy_process_group(process_group)
        else:  # destroying would wait for operations that the others may never join
            for group in (*local.groups.values(), local.statistics, local.world):
                group.abort()

    def at_exit() -> None:
        end(True)

    sys.excepthook = uncaught
    atexit.register(at_exit)
    return end


def _meet_again(rank: int, size: int, store: dist.Store) -> bool:
    """Whether all ranks came to this end. A connection that closes may take along what a slower rank has not read yet, so they wait, for a while."""
    try:
        store.set(f"parting/{rank}", "")
        store.wait([f"parting/{other}" for other in range(size)], timedelta(seconds=FAREWELL_SECONDS))
    except RuntimeError:  # some rank is elsewhere, or the store went away with a rank that was done
        return False
    return True


def _meeting_place(seat: _Seat, timeout: timedelta) -> dist.Store:
    return dist.TCPStore(
        seat.address, seat.port, None, is_master=seat.hosts_store, timeout=timeout, wait_for_workers=False, multi_tenant=seat.hosts_store
    )


def _agreed_device(seat: _Seat, devices: str, store: dist.Store) -> tuple[Kind, torch.device, str]:
    """The same kind of device on all ranks: cuda if each has a GPU of its own."""
    wanted = os.environ.get("MESHLOOM_DEVICES", devices) if devices == "auto" else devices
    count = torch.cuda.device_count()
    index = seat.local_rank % max(1, count)
    # Some clusters show each process all of a machine's GPUs, others one; what counts is whether two ranks would share.
    own = f"{socket.gethostname()}/{torch.cuda.get_device_properties(index).uuid}" if count and wanted != "cpu" else ""
    store.set(f"gpu/{seat.rank}", own)
    seen = [store.get(f"gpu/{rank}").decode() for rank in range(seat.size)]
    num_gpus = len({gpu for gpu in seen if gpu})
    if num_gpus == seat.size:
        return "cuda", torch.device("cuda", index), _gpus(num_gpus)
    if wanted == "cuda":
        raise DeviceError(f"devices=cuda needs {seat.size} GPUs, one for each rank, and {_gpus(num_gpus)}. Use devices=cpu.")
    return "cpu", torch.device("cpu"), "asked for" if devices == "cpu" else _gpus(count)


# --- The choice, made before anything is started.


def choose_devices(mesh: Mesh, devices: str = "auto") -> tuple[Kind, str]:
    """Where the ranks of `mesh` go on this machine, and a line that says why: for cuda and cpu, `run_ranks` starts them if there are several.

    GPUs if there is one for each rank; otherwise CPU processes if there is a core for each; otherwise simulated.
    Raises `DeviceError` when what was asked for is not there.
    """
    _check_devices(devices)
    num_gpus, num_cores, size = torch.cuda.device_count(), _cores(), mesh.size
    if devices == "cuda" and size > num_gpus:
        instead = "devices=cpu or devices=simulated" + (f", or a plan of at most {_ranks(num_gpus)}" if num_gpus else "")
        raise DeviceError(f"devices=cuda needs {size} GPU{'s' * (size > 1)}, one for each rank, and {_gpus(num_gpus)}. Use {instead}.")
    if devices == "simulated:cuda" and not num_gpus:
        raise DeviceError("devices=simulated:cuda needs a GPU, and none is visible. Use devices=simulated.")
    reason = "asked for" if devices != "auto" else _gpus(num_gpus)
    if devices == "cuda" or (devices == "auto" and size <= num_gpus):
        return "cuda", f"cuda: {_ranks(size)}, one GPU each ({reason})"
    if devices == "cpu" or (devices == "auto" and size <= num_cores):
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, num_cores // size))
        return "cpu", f"cpu: {_ranks(size)} as process{'es' * (size > 1)} on {num_cores} cores, {_threads(threads)} each ({reason})"
    if devices == "auto":
        reason += f", and {size} ranks are more than {num_cores} cores"
    return (
        "simulated",
        f"simulated: {_ranks(size)} in one process on {num_gpus if ':' in devices else num_cores} {'GPUs' if ':' in devices else 'cores'} ({reason})",
    )


def is_rank() -> bool:
    """Whether this process is one of several that were started as ranks."""
    seat = _seat(os.environ)
    return seat is not None and (seat.size > 1 or "RANK" in os.environ)


def launched_plan() -> str | None:
    """The text of the plan that the launcher decided on; None if this process is not a rank of our launcher."""
    return os.environ.get("MESHLOOM_PLAN")


def default_ranks(devices: str = "auto") -> int:
    """How many ranks to use when no plan says it: those that were started, else one for each GPU, else one."""
    _check_devices(devices)
    seat = _seat(os.environ)
    if seat:
        return seat.size
    return max(1, torch.cuda.device_count()) if devices in ("auto", "cuda", "simulated:cuda") else 1


def _check_devices(devices: str) -> None:
    if devices not in DEVICES:
        raise DeviceError(f"devices={devices} is not known. Use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}.")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _gpus(count: int) -> str:
    return {0: "no GPU is visible", 1: "1 GPU is visible"}.get(count, f"{count} GPUs are visible")


def _axes(mesh: Mesh) -> list[Axis]:
    return [axis for axis in AXES if axis == "dp" or getattr(mesh, axis) > 1]


def _sizes(mesh: Mesh) -> str:
    return ",".join(f"{axis}={getattr(mesh, axis)}" for axis in _axes(mesh))


def _name(rank: int, mesh: Mesh | None) -> str:
    return f"rank {rank} ({mesh.place(rank)})" if mesh and rank < mesh.size else f"rank {rank}"


# --- The environment of a rank.


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """What a process that was started as a rank has been told."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosts_store: bool


def _seat(environment: Mapping[str, str]) -> _Seat | None:
    """This process's seat: from the user's own init_process_group, from torchrun or something like it, or from srun; None if it is no rank."""
    try:
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            local_rank = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", rank)))
            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
            return _Seat(rank=rank, size=size, local_rank=local_rank, local_size=local_size, address="", port=0, hosts_store=False)
        if "RANK" in environment and "WORLD_SIZE" in environment:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            return _Seat(
                rank=rank,
                size=size,
                local_rank=int(environment.get("LOCAL_RANK", 0)),
                local_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
                address=environment["MASTER_ADDR"] if size > 1 else "",
                port=int(environment["MASTER_PORT"]) if size > 1 else 0,
                hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        # A batch script has SLURM_PROCID too; what srun starts also has a step with tasks.
        if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
            size = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", 1)))
            if size == 1:  # a shell of salloc
                return None
            job, step = int(environment.get("SLURM_JOB_ID", 0)), int(environment["SLURM_STEP_ID"])
            nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
            tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
            return _Seat(
                rank=int(environment["SLURM_PROCID"]),
                size=size,
                local_rank=int(environment.get("SLURM_LOCALID", 0)),
                local_size=int(re.split(r"\D", tasks)[0]),
                address=environment.get("MASTER_ADDR") or first_host(nodes),
                port=int(environment.get("MASTER_PORT") or 15000 + (job * 7 + step) % 15000),
                hosts_store=environment["SLURM_PROCID"] == "0",
            )
    except KeyError as missing:
        raise DeviceError(f"RANK and WORLD_SIZE are set, but {missing.args[0]} is not. Start with torchrun, or set all of them.") from None
    except ValueError as error:
        raise DeviceError(f"The environment of this rank holds something that is not a number: {error}.") from None
    return None


def first_host(nodes: str) -> str:
    """The first name of a Slurm list of hosts.

    >>> first_host("gpu[07-09,12],login1"), first_host("a1,a2")
    ('gpu07', 'a1')
    """
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


# --- What a rank tells: its launcher if it has one, otherwise whoever reads stderr.


def report_failure(error: BaseException, mesh: Mesh | None = None) -> int:
    """Tell the launcher, or whoever reads stderr, what ended this process; the exit code that belongs to it.

    One message: the error, this rank and its place, and the line of the user's own code that it came from; with the traceback
    where meshloom does not know the error. `mesh` gives the place under torchrun; our launcher's plan says it too.
    """
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    seat, plan = _seat(os.environ), launched_plan()
    mesh = mesh or (Plan.parse(plan).mesh if plan else None)
    line = _own_line(error)
    failure = _Failure(
        who=_name(seat.rank, mesh) if seat and seat.size > 1 else "",
        kind=type(error).__name__,
        message=str(error)[:20_000],
        line=line,
        traceback="" if isinstance(error, MeshloomError) else "".join(traceback.format_exception(error))[-50_000:],
        consequence=isinstance(error, PeerLostError),
        exit_code=error.exit_code if isinstance(error, MeshloomError) else 1,
    )
    if not _tell({"event": "failed", **vars(failure)}):
        # One short line of each rank that only noticed: the cause is in another rank's message.
        text = f"{failure.kind} on {failure.who}: {failure.message.splitlines()[0]}" if failure.consequence and failure.who else str(failure)
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return failure.exit_code


def leave(exit_code: int) -> None:
    """End this process now. An ordinary exit would first wait for operations under way, which a rank that has failed never completes."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    who: str
    kind: str
    message: str
    line: str
    traceback: str
    consequence: bool
    exit_code: int

    def __str__(self) -> str:
        where = f"{self.kind} on {self.who}" if self.kind and self.who else self.kind or _capital(self.who)
        text = f"{where}{':' if self.kind else ''} {self.message}" if self.message else where
        return "\n".join(part for part in (self.traceback.rstrip(), text, f"  {self.line}" if self.line else "") if part)


def _tell(event: Mapping[str, object]) -> bool:
    """Send a line to our launcher; False if there is none. If it is gone, this process goes too."""
    descriptor = os.environ.get("MESHLOOM_REPORT_FD")
    if descriptor is None:
        return False
    text = json.dumps(event).encode() + b"\n"
    try:
        while text:
            text = text[os.write(int(descriptor), text) :]
    except BrokenPipeError:
        os.killpg(0, signal.SIGKILL)
    except OSError:  # a program that a rank has started inherits the variable, but not the pipe
        return False
    return True


def _own_line(error: BaseException) -> str:
    """The deepest line of the user's own code in the traceback, "file:number: text"; "" if there is none. A cause comes before what it led to."""
    chain = [error]
    while (before := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)) and before not in chain:
        chain.append(before)
    frames = [[(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(each.__traceback__)] for each in chain]
    # A data worker's traceback arrives as text.
    told = [
        [(name, int(number)) for name, number in re.findall(r'File "([^"]+)", line (\d+)', str(each))]
        for each in chain
        if "Original Traceback" in str(each)
    ]
    ours = (f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", f"{sysconfig.get_path('scripts')}{os.sep}", "<")
    installed = (*ours, *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")))
    for others in (installed, ours):  # what is installed may be the user's own package
        for trace in [*reversed(told), *reversed(frames)]:
            for name, number in reversed(trace):
                if not name.startswith(others):
                    return f"{_shown(name)}:{number}: {_source(name, number)}".rstrip(": ")
    return ""


def _shown(name: str) -> str:
    with suppress(ValueError, OSError):
        return str(Path(name).relative_to(Path.cwd()))
    return name


def _source(name: str, number: int) -> str:
    return linecache.getline(name, number).strip()


# --- The launcher.


def run_ranks(command: list[str], mesh: Mesh, devices: str, plan_text: str) -> int:
    """Run `command` once per rank, as processes of this machine, until all have ended; the exit code.

    devices: "cuda" or "cpu", as `choose_devices` said; ranks find it, and the plan, in their environment.
    stdout is rank 0's; what the others print goes to stderr, with their rank. The first failure ends all ranks and is printed to
    stderr, once. SIGINT, SIGTERM and SIGHUP end all ranks too: 130, 143, 129. No process of the ranks is left, whatever happens.
    """
    with _noted_signals() as signals:
        with _Guard() as guard, _Ranks(guard) as ranks:
            outcome = ranks.start(command, mesh, devices, plan_text, signals) or ranks.watch(signals)
            ranks.end(signals)
        if outcome.text:
            print(outcome.text, file=sys.stderr, flush=True)  # noqa: T201
        return outcome.exit_code


@dataclass(frozen=True)
class _Outcome:
    exit_code: int
    text: str = ""


@contextmanager
def _noted_signals() -> Generator[list[int]]:
    """The signals that asked this process to end, in a list, instead of what they usually do. One that is ignored (nohup) stays so."""
    received: list[int] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stopped(signals: list[int]) -> _Outcome | None:
    return _Outcome(128 + signals[0], f"Stopped by {signal.Signals(signals[0]).name}; all ranks have ended.") if signals else None


# Reads "+group" and "-group"; when the pipe closes, kills the groups that are left.
_GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class _Guard:
    """A process that outlives this one for long enough to kill the ranks."""

    def __enter__(self) -> _Guard:
        # A session of its own: Ctrl-C in the terminal and a signal to this process's group do not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def tell(self, sign: Literal["+", "-"], group: int) -> None:
        """Add a process group to those that end with this process, or leave it out again."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # somebody has killed the guard
            self._process.stdin.write(f"{sign}{group}\n".encode())
            self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


@dataclass(kw_only=True)
class _Rank:
    """A rank process, from the launcher's side."""

    number: int
    name: str
    process: subprocess.Popen[bytes]
    report: int  # descriptor: lines of JSON
    unread: dict[int, bytes] = field(default_factory=dict[int, bytes])  # by descriptor, of a line that has not ended
    joining: bool = False
    joined: bool = False
    failure: _Failure | None = None

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    @property
    def output(self) -> int | None:
        return self.process.stdout.fileno() if self.process.stdout else None


class _Ranks:
    """The rank processes: a context manager that ends them."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard
        self._ranks: list[_Rank] = []
        self._failures: list[tuple[float, _Failure]] = []  # in the order in which they were noticed
        self._selector = selectors.DefaultSelector()
        self._store: dist.Store | None = None

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end([])
        self._selector.close()
        self._store = None

    def start(self, command: list[str], mesh: Mesh, devices: str, plan_text: str, signals: list[int]) -> _Outcome | None:
        """Start all ranks, and see to it that they are ended; what stopped that, if anything did."""
        # The store takes over a socket that is bound already, to this machine alone.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
        for rank in range(mesh.size):
            if outcome := _stopped(signals):
                return outcome
            here, there = os.pipe()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.PIPE,
                    stderr=None if rank == 0 else subprocess.STDOUT,
                    env={**_defaults(mesh.size), **os.environ, **_seat_variables(rank, mesh.size, port, devices, plan_text, there)},
                    pass_fds=[there],
                    start_new_session=True,
                )
                self._guard.tell("+", process.pid)
            except OSError as error:
                os.close(here)
                return _Outcome(1, f"Rank {rank} could not be started: {error}.")
            finally:
                os.close(there)
            self._ranks.append(_Rank(number=rank, name=_name(rank, mesh), process=process, report=here))
            for descriptor in (here, self._ranks[-1].output):
                if descriptor is not None:
                    os.set_blocking(descriptor, False)
                    self._selector.register(descriptor, selectors.EVENT_READ, self._ranks[-1])
        return None

    def watch(self, signals: list[int]) -> _Outcome:
        """Pass on what the ranks say until all have ended, one has failed, or a signal came."""
        while True:
            self._listen(0.05)
            for rank in self._ranks:
                if rank.exit_code is None and rank.process.poll() is not None:
                    self._bury(rank)
            if outcome := _stopped(signals) or self._failed():
                return outcome
            if all(rank.exit_code == 0 for rank in self._ranks):
                return _Outcome(0)

    def _failed(self) -> _Outcome | None:
        causes = [failure for _, failure in self._failures if not failure.consequence]
        if causes:
            return _Outcome(causes[0].exit_code, str(causes[0]))
        gone = [rank for rank in self._ranks if rank.exit_code == 0]
        if gone and not gone[0].joined and any(rank.joining and not rank.joined for rank in self._ranks):
            return _Outcome(1, f"{_capital(gone[0].name)} ended before it joined the others, which wait for it.")
        if not self._failures or time.monotonic() < self._failures[0][0] + CAUSE_SECONDS:
            return None
        first = self._failures[0][1]
        if gone:
            return _Outcome(
                1, f"{_capital(gone[0].name)} ended without an error while {first.who} was still working together with it: {first.message}"
            )
        return _Outcome(first.exit_code, str(first))

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            self._read(key.data, key.fd)

    def _read(self, rank: _Rank, descriptor: int) -> None:
        """Take what there is to read, line by line."""
        while True:
            try:
                text = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            lines = (rank.unread.pop(descriptor, b"") + text).split(b"\n")
            if not text:  # all who could write have ended
                self._selector.unregister(descriptor)
            if text or not lines[-1]:
                rank.unread[descriptor] = lines.pop()
            for line in lines:
                self._hear(rank, line) if descriptor == rank.report else self._print(rank, line)
            if not text:
                return

    def _hear(self, rank: _Rank, line: bytes) -> None:
        event = json.loads(line)
        kind = event.pop("event")
        if kind == "failed" and not rank.failure:
            rank.failure = _Failure(**event)
            self._failures.append((time.monotonic(), rank.failure))
        rank.joining = rank.joining or kind == "joining"
        rank.joined = rank.joined or kind == "joined"

    def _print(self, rank: _Rank, line: bytes) -> None:
        sys.stderr.write(f"[rank {rank.number}] {line.decode(errors='replace')}\n")
        sys.stderr.flush()

    def _bury(self, rank: _Rank) -> None:
        """A rank process has ended: hear its last words, and end what it leaves behind."""
        _signal(rank, signal.SIGKILL)
        self._guard.tell("-", rank.process.pid)
        for descriptor in (rank.report, rank.output):
            if descriptor is not None and descriptor in self._selector.get_map():
                self._read(rank, descriptor)
        if rank.exit_code and rank.failure is None:
            number = -rank.exit_code
            message = f"was killed by {signal.Signals(number).name}" if number > 0 else f"ended with exit code {rank.exit_code}, and did not say why"
            hint = " (the system does that when memory runs out)" if number == signal.SIGKILL else ""
            rank.failure = _Failure(who=rank.name, kind="", message=f"{message}{hint}.", line="", traceback="", consequence=False, exit_code=1)
            self._failures.append((time.monotonic(), rank.failure))

    def end(self, signals: list[int]) -> None:
        """End all processes: ask, wait a little (not after a second signal), kill."""
        for rank in self._ranks:
            if rank.exit_code is None:
                _signal(rank, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(rank.process.poll() is None for rank in self._ranks) and time.monotonic() < deadline and len(signals) < 2:
            self._listen(0.02)
        for rank in self._ranks:
            _signal(rank, signal.SIGKILL)
            rank.process.wait()
            self._bury(rank)
            if rank.process.stdout:
                if rest := rank.unread.pop(rank.process.stdout.fileno(), b""):
                    self._print(rank, rest)
                rank.process.stdout.close()
            os.close(rank.report)
        self._ranks = []


def _signal(rank: _Rank, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(rank.process.pid, number)


def _defaults(size: int) -> dict[str, str]:
    """What the user's own environment may replace."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {
        "OMP_NUM_THREADS": str(max(1, _cores() // size)),
        "PYTHONUNBUFFERED": "1",  # what a rank printed before it was killed is not lost
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }


def _seat_variables(rank: int, size: int, port: int, devices: str, plan_text: str, report: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is hosted by whoever started the ranks, as under torchrun
        "MESHLOOM_PLAN": plan_text,
        "MESHLOOM_DEVICES": devices,
        "MESHLOOM_REPORT_FD": str(report),
    }


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
