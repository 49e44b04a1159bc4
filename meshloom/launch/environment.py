"""The environment that torchrun, Slurm or our launcher give a process. Only this file reads it."""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshloom.core.cache import Cache
from meshloom.core.errors import DeviceError
from meshloom.launch.role import Role
from meshloom.machine.cores import cores

SCRATCH = "MESHLOOM_SCRATCH"  # see `scratch_directory`
LEAST_SECRET = 16  # characters of MESHLOOM_SECRET
REFERENCE = "MESHLOOM_REFERENCE_FD"
_ASIDE, _PROCESS = (
    "MESHLOOM_LAUNCHED",
    "process",
)  # what describes a rank, as JSON, with the process that is it
_OF_A_RANK = re.compile(  # by which a program knows which of several it is, and where they meet
    r"((LOCAL|GROUP|ROLE|NODE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|NNODES|STEP_NUM_TASKS|STEP_NUM_NODES|(STEP_)?TASKS_PER_NODE)"
    r"|(PMI|PMIX|OMPI_COMM_WORLD|MV2_COMM_WORLD)_((LOCAL|NODE)_)?(RANK|SIZE)"
    r"|MESHLOOM_(PLAN|SECRET|DEVICES|TIMEOUT|REPORT_FD|ACTIVITY_FD|BEGAN)"
)


def is_rank() -> bool:
    """Whether this process is one of several that were started as ranks. Raises as `launched_rank` does."""
    launched = launched_rank()
    return launched is not None and (launched.size > 1 or "RANK" in _told())


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    launched = launched_rank()
    return launched is None or launched.rank == 0


def launched_plan() -> str | None:
    """The text of the launcher's plan; None if this process is not a rank of our launcher."""
    return _told().get("MESHLOOM_PLAN")


def launched_devices(devices: str) -> str:
    """What to use for `devices` "auto": the launcher's choice, if there is one."""
    return _told().get("MESHLOOM_DEVICES", devices) if devices == "auto" else devices


def launched_transport(transport: str) -> str:
    """What to use for `transport` "auto": what the user or our launcher has set for all ranks."""
    return os.environ.get("MESHLOOM_TRANSPORT", transport) if transport == "auto" else transport


def launched_timeout() -> float:
    """Seconds that a rank waits for another where its program does not say."""
    return float(_told().get("MESHLOOM_TIMEOUT", 600.0))


def launched_secret() -> bytes:
    """The key that this run's ranks share, set by our launcher, or by the user under another; b"": none.

    Raises `DeviceError` if it is short enough to be guessed.
    """
    return read_secret(_told())


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The same, of this environment."""
    secret = environment.get("MESHLOOM_SECRET", "")
    if secret and len(secret) < LEAST_SECRET:
        raise DeviceError(
            f"MESHLOOM_SECRET has {len(secret)} characters and can be guessed: give {LEAST_SECRET} or more ($(openssl rand -hex 32))."
        )
    return secret.encode()


def launched_role() -> Role | None:
    """The role of this process in an asynchronous run; None if it was not started as a server or worker."""
    text = os.environ.get("MESHLOOM_ROLE")
    return Role.from_json(text) if text else None


def report_descriptor() -> int | None:
    """The pipe to our launcher; None if there is none."""
    descriptor = _told().get("MESHLOOM_REPORT_FD")
    return None if descriptor is None else int(descriptor)


def scratch_directory() -> str | None:
    """A directory for files of this rank and its data workers, if any, which our launcher removes."""
    return os.environ.get(SCRATCH)


def reference_descriptor() -> int | None:
    """The socket to rank 0 of the process in which verification has one device; None: this is another process."""
    descriptor = os.environ.get(REFERENCE)
    return None if descriptor is None else int(descriptor)


def activity_descriptor() -> int | None:
    """The one-page file in which our launcher reads this rank's activity; None if there is none."""
    descriptor = _told().get("MESHLOOM_ACTIVITY_FD")
    return None if descriptor is None else int(descriptor)


def cache_directory(said: str) -> Path | None:
    """Where captured programs and choices are kept for later runs; None: nowhere.

    said: auto (the environment's directory, else the user's cache), off, or a directory.
    """
    wanted = os.environ.get("MESHLOOM_CACHE", "auto") if said == "auto" else said
    if wanted == "off":
        return None
    if wanted != "auto":
        return Path(wanted).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "meshloom" / "readings"


def opened_cache(said: str) -> Cache | None:
    """The cache in `cache_directory`."""
    directory = cache_directory(said)
    return Cache(directory) if directory is not None else None


def launching_seconds() -> float:
    """Seconds from the start of our launcher to that of this process; 0 if there is no launcher. Start times
    are estimated by processor time, so waiting of either until now is not seen."""
    began = _told().get("MESHLOOM_BEGAN")
    return max(0.0, process_began() - float(began)) if began else 0.0


def process_began() -> float:
    """When this process started, by its processor time."""
    return time.time() - time.process_time()


def wants_full_traceback() -> bool:
    """Whether tracebacks keep the frames of meshloom and torch."""
    return os.environ.get("MESHLOOM_TRACEBACK") == "full"


def threads_per_rank(num_ranks: int) -> int:
    """Threads of each of `num_ranks` processes of this machine: OMP_NUM_THREADS, or a share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is for nested regions
    return int(said) if said.isdecimal() and int(said) else max(1, cores() // num_ranks)


def allocator_is_set() -> bool:
    """Whether the user has set glibc's allocator, in one of its two ways."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """A process that was started as a rank: its numbers; the store's address, and whether it hosts it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    port: int = 0
    hosts_store: bool = False


def launched_rank() -> LaunchedRank | None:
    """This process's rank; None if it is none. Raises `DeviceError` for variables that are missing or make no sense."""
    return read_launched_rank(_told())


@contextmanager
def ranks_aside() -> Iterator[None]:
    """A context in which a job finds no variables that tell it, or a library of its, which rank this process is: the job is a
    program for one device, and its ranks are meshloom's."""
    before = os.environ.get(_ASIDE)
    found = _put_aside()
    try:
        yield
    finally:
        os.environ.pop(_ASIDE, None)
        os.environ.update(found if before is None else {**found, _ASIDE: before})


def begin_script() -> bool:
    """At `import meshloom`: put aside, for good, what tells a script or a library of its which rank this process is, and where ranks
    meet. MESHLOOM_KEEP_RANKS=1 keeps it, and so does a process group that the script has made. Whether this is a rank of a script:
    ranks of our launcher begin with a command of ours."""
    if dist.is_available() and dist.is_initialized():
        return False
    try:
        if not is_rank():
            return False
    except DeviceError:  # whoever asks for the rank raises it
        return False
    if os.environ.get("MESHLOOM_KEEP_RANKS") != "1":
        _put_aside()
    return report_descriptor() is None


def begun_as_rank() -> bool:
    """Whether this process was a rank when meshloom was imported, by `begin_script`."""
    return bool(_aside()) or (os.environ.get("MESHLOOM_KEEP_RANKS") == "1" and is_rank())


def bring_ranks_back() -> None:
    """The script makes its own process group: what was put aside is in its environment."""
    found = dict(_aside())
    os.environ.pop(_ASIDE, None)
    found.pop(_PROCESS, None)
    os.environ.update(found)


def script_seed() -> int:
    """The seed of what a rank's script draws."""
    text = os.environ.get("MESHLOOM_SEED", "0")
    if not _DIGITS.fullmatch(text):
        raise DeviceError(
            f"MESHLOOM_SEED={text!r} of this process's environment must be a whole number, 0 or more."
        )
    return int(text)


def set_for_script(plan: str, devices: str, transport: str, timeout_seconds: float) -> None:
    """A script that is run in this process finds these where it does not say otherwise. plan: "" is none."""
    said = {"PLAN": plan, "DEVICES": devices, "TRANSPORT": transport, "TIMEOUT": str(timeout_seconds)}
    told = {f"MESHLOOM_{name}": value for name, value in said.items() if value}
    os.environ.update({name: value for name, value in told.items() if name not in _told()})
    if _aside():
        _put_aside()


def use_absolute_import_paths() -> None:
    """What this process finds beside a relative path, processes that it starts in other folders find, too."""
    if paths := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))


def _put_aside() -> dict[str, str]:
    found = {name: os.environ.pop(name) for name in [*os.environ] if _OF_A_RANK.fullmatch(name)}
    os.environ[_ASIDE] = json.dumps({**_aside(), **found, _PROCESS: str(os.getpid())})
    return found


def _aside() -> Mapping[str, str]:
    """What this process has put aside. A process that it has started is no rank."""
    found = json.loads(os.environ.get(_ASIDE, "{}"))
    return found if found.get(_PROCESS) == str(os.getpid()) else {}


def _told() -> Mapping[str, str]:
    """This process's environment, with what is aside."""
    return {**os.environ, **_aside()}


def of_no_rank() -> dict[str, str]:
    """The environment without what describes this process as a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (name == _ASIDE or _OF_A_RANK.fullmatch(name))
    }


def read_launched_rank(environment: Mapping[str, str]) -> LaunchedRank | None:
    """The rank by the user's init_process_group, or as torchrun or srun describe it; None: none."""
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        place = "LOCAL_RANK" if "LOCAL_RANK" in environment else "SLURM_LOCALID"
        local_rank, local_size = _number(environment, place), _number(environment, "LOCAL_WORLD_SIZE", 1)
        return LaunchedRank(
            rank=rank,
            size=size,
            local_rank=rank if local_rank is None else local_rank,
            local_size=local_size or size,
        )
    size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0, "WORLD_SIZE")
    if rank is not None and size is not None:
        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
        local_rank = _number(environment, "LOCAL_RANK", 0, "LOCAL_WORLD_SIZE" if local_size else "WORLD_SIZE")
        return LaunchedRank(
            rank=rank,
            size=size,
            local_rank=local_rank or 0,
            local_size=local_size or 1,
            address=_required(environment, "MASTER_ADDR") if size > 1 else "",
            port=_port(environment) if size > 1 else 0,
            hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
    # A batch script has SLURM_PROCID too; what srun starts also has a step with tasks, of which a shell of salloc is one.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        counted = next((each for each in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if each in environment), "")
        tasks = _number(environment, counted, 1) or 1
        if tasks > 1:
            return _slurm_rank(environment, counted, tasks)
    if rank is not None or (size or 1) > 1:
        there, missing = ("RANK", "WORLD_SIZE") if rank is not None else ("WORLD_SIZE", "RANK")
        raise DeviceError(
            f"{there}={environment[there]} is set and {missing} is not, so this process may be one of several, each of which would train the whole job. {_WAY_OUT}"
        )
    return None


def _slurm_rank(environment: Mapping[str, str], counted: str, size: int) -> LaunchedRank:
    """A task of a Slurm step of `size`, which the variable `counted` says."""
    rank = _number(environment, "SLURM_PROCID", 0, counted) or 0
    job, step = _number(environment, "SLURM_JOB_ID") or 0, _number(environment, "SLURM_STEP_ID") or 0
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    on_each = re.match(r"[1-9][0-9]*", tasks)  # as in 4(x2)
    return LaunchedRank(
        rank=rank,
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID") or 0,
        local_size=int(on_each[0]) if on_each else 1,
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=_port(environment)
        if environment.get("MASTER_PORT")
        else _slurm_port(read_secret(environment), job, step),
        hosts_store=rank == 0,
    )


_WAY_OUT = "Start with torchrun or srun, which set all of it; or unset it, and meshloom train starts the ranks of a plan itself."
_DIGITS, _MOST_PORT = re.compile(r"[0-9]{1,18}"), 2**16 - 1


def _required(environment: Mapping[str, str], name: str) -> str:
    """The value of a variable that ranks cannot do without."""
    if not (value := environment.get(name, "")):
        raise DeviceError(
            f"RANK and WORLD_SIZE are set, but {name} is not. Start with torchrun, or set all of them."
        )
    return value


def _port(environment: Mapping[str, str]) -> int:
    _required(environment, "MASTER_PORT")
    return _number(environment, "MASTER_PORT", 1, most=_MOST_PORT) or 0


def _number(
    environment: Mapping[str, str], name: str, least: int = 0, count: str = "", most: int | None = None
) -> int | None:
    """The value of a variable; None: it is not set. count: the variable, if it is set, of how many numbers there are, from 0."""
    if (text := environment.get(name)) is None:
        return None
    if count in environment:
        most = int(environment[count]) - 1
    if _DIGITS.fullmatch(text) and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    upto = "or more" if most is None else f"to {most}" if most > least else ""
    why = f", as {count}={environment[count]}" if count in environment else ""
    asked = f"a whole number, {least} {upto}".rstrip() + why
    raise DeviceError(f"{name}={text!r} of this process's environment must be {asked}. {_WAY_OUT}")


def _slurm_port(secret: bytes, job: int, step: int) -> int:
    """The port of rank 0 of a Slurm step, derived from the secret: a stranger who knew it could listen there
    first and pass for rank 0."""
    if not secret:
        raise DeviceError(
            "Ranks that srun starts need a shared secret, with which they sign and from which their port is derived: before srun, "
            "export MESHLOOM_SECRET=$(openssl rand -hex 32). Or set MASTER_PORT, if nobody else can log in to the nodes."
        )
    digest = hmac.digest(secret, f"port of {job}.{step}".encode(), "sha256")
    return 15000 + int.from_bytes(digest[:8], "big") % 15000


def first_host(nodes: str) -> str:
    """The first name in a Slurm host list.

    >>> first_host("gpu[07-09,12],login1"), first_host("a1,a2")
    ('gpu07', 'a1')
    """
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
