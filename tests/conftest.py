"""Every test leaves the process and the machine as it found them, or fails saying what it left."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from tqdm import tqdm
from zmq.utils.garbage import GarbageCollectorThread

import meshloom.tensor_parallel.division
from meshloom.asynchronous.state import worker_replica
from meshloom.core.mesh import Mesh
from meshloom.core.random import seed_everything
from meshloom.launch import opening
from meshloom.launch.one_process import world_in_one_process
from meshloom.launch.world import World
from meshloom.program.cost.rates import Rates
from tests.subset import pytest_collection_modifyitems as pytest_collection_modifyitems

# that a machine is slow says nothing of what is drawn
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
GRACE_SECONDS = 5.0  # for what is ending by itself when the test returns
# it reads the program's words as it is imported, as people's files do, and here they are pytest's
collect_ignore = ["words_job.py", "resumed_loop.py"]
collect_ignore_glob = ["loop_scripts/*"]  # they train when they are imported
# not there on every machine with a GPU, which has a torch of its own
collect_ignore += [
    test
    for test, package in {
        "test_lightning.py": "lightning",
        "test_transformers.py": "accelerate",
    }.items()
    if find_spec(package) is None
]
CACHES = {".pytest_cache", ".hypothesis", ".ruff_cache", "__pycache__"}


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process, as several ranks share the machine; orphans of orphans become this process's
    children, so that they are seen.

    The first store in a process opens a pipe that libuv keeps until the process ends. No test opens that one,
    whichever runs first.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        # as a shell starts what runs in its background: the programs under test would inherit it
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    PR_SET_CHILD_SUBREAPER = 36  # noqa: N806
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_collection_finish() -> None:
    """What is imported and collected by now is there until the end. Looking for garbage in it, again and
    again, was an eighth of the work of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this process and its children go where nobody else's are, so that those left behind
    can be told."""
    kept = tmp_path_factory.getbasetemp()  # pytest's own, which it removes itself, stays outside
    multiprocessing.util.get_temp_dir()  # and so does Python's
    environment, previous = dict(os.environ), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="meshloom-tests-") as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        # what was measured of this machine lies at home, and would decide how models are divided
        os.environ["HOME"] = str(kept)
        # tests have nothing in common; who tests what is kept says where
        os.environ["MESHLOOM_CACHE"] = "off"
        # torch makes one when it is first used
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept / "torchinductor")
        yield
    tempfile.tempdir = previous
    _restore_environment(environment)


@pytest.fixture(scope="session", autouse=True)
def _open_gpu(request: pytest.FixtureRequest, _own_temporary_directory: None) -> None:
    """A GPU's driver opens files and pipes when it is first used, and keeps them."""
    if request.config.getoption("--device") == "cuda":
        torch.zeros(1, device="cuda").matmul(torch.zeros(1, device="cuda"))


@pytest.fixture(autouse=True)
def _hygiene(_own_temporary_directory: None, _open_gpu: None) -> Iterator[None]:
    """Fail a test that leaks a process, thread, file or segment, or changes what all tests share; undo it for
    the next one."""
    seed_everything(0)
    settings = {name: read() for name, (read, _) in SETTINGS.items()}
    environment = dict(os.environ)
    held = {name: find() for name, (find, _) in RESOURCES.items()}
    yield
    left: list[str] = []
    for name, (find, end) in RESOURCES.items():
        if (new := find() - held[name]) and (new := end(new)):
            left.append(f"{name}: {', '.join(sorted(map(str, new)))}")
    for name, (read, restore) in SETTINGS.items():
        if (value := read()) != settings[name]:
            left.append(f"{name}: {settings[name]} before, {value} after")
            restore(settings[name])
    left += _restore_environment(environment)
    if left:
        pytest.fail("This test left something behind.\n" + "\n".join(left), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the worlds of tests that start no processes compute",
    )


@pytest.fixture(autouse=True)
def _worlds_on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process opens as a world, whether one rank or several simulated ones, is on the device of
    `--device`, unless the test is marked `on_cpu`; a report says which tests opened one."""
    on_cpu = request.node.get_closest_marker("on_cpu") is not None
    device = "cpu" if on_cpu else request.config.getoption("--device")

    def opened(mesh: Mesh, devices: str, **more: Any) -> World:
        if ("device", device) not in request.node.user_properties:
            request.node.user_properties.append(("device", device))
        if device == "cuda":
            devices = "cuda" if mesh.size == 1 and not devices.startswith("simulated") else "simulated:cuda"
        return world_in_one_process(mesh, devices, **more)

    for module in (opening, worker_replica):
        monkeypatch.setattr(module, "world_in_one_process", opened)


@pytest.fixture
def without_job_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of jobs that other tests have written in this process, which stores nothing for that."""
    for name in [each for each in sys.modules if each.startswith("meshloom_job_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that load a file put its folder on Python's path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def silent_export() -> Iterator[None]:
    """Transformers and torch.export warn about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def compiler() -> Iterator[None]:
    """Torch's compiler leaves a variable, a thread of tqdm and a pool of its own."""
    yield
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)
    monitor: Any = tqdm.monitor
    if monitor is not None:
        monitor.exit()
        tqdm.monitor = None
    compiling: Any = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.AsyncCompile.pool().shutdown()
        compiling.AsyncCompile.pool.cache_clear()


@pytest.fixture
def dear_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which it pays to divide small models along tp too, as it does everywhere for those of real
    sizes."""
    rates = Rates(start_seconds=1e-6, latency_seconds=1e-6, memory_price=1e5)
    monkeypatch.setattr(meshloom.tensor_parallel.division, "rates_for", lambda *_: rates)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No machine was measured in this home."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)


# --- What all tests share: how to read it and how to put it back.


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast on the CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
    ),
    "process group": (torch.distributed.is_initialized, lambda _: torch.distributed.destroy_process_group()),
    "working directory": (os.getcwd, os.chdir),
    "handler of SIGINT": (
        lambda: signal.getsignal(signal.SIGINT),
        lambda value: signal.signal(signal.SIGINT, value),
    ),
    "handler of SIGTERM": (
        lambda: signal.getsignal(signal.SIGTERM),
        lambda value: signal.signal(signal.SIGTERM, value),
    ),
}


# Set by pytest, and by scikit-learn for the OpenMP that it brings.
_OF_OTHERS = ("PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")


def _restore_environment(before: dict[str, str]) -> list[str]:
    after = dict(os.environ)
    changed = [
        name for name in {*before, *after} if before.get(name) != after.get(name) and name not in _OF_OTHERS
    ]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [
        f"environment variable {name}: {before.get(name)!r} before, {after.get(name)!r} after"
        for name in sorted(changed)
    ]


# --- What can leak: how to find all there is, and, given what is new, what remains of it once it had its
# chance.


def _children() -> set[int]:
    """Children of this process and of the server that forks for it, without that server and Python's own
    resource tracker."""
    server, tracker = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
    return (_children_of(os.getpid()) | (_children_of(server) if server else set())) - {server, tracker}


def _children_of(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        # a thread has ended meanwhile: its children are another's now
        return _children_of(pid) if Path(f"/proc/{pid}").exists() else set()
    return found


def _end_children(pids: set[int]) -> set[str]:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=GRACE_SECONDS)  # reaps those that are dead already
    left = {f"{each.pid} {' '.join(each.cmdline())[:200]}" for each in alive}
    for each in alive:
        each.kill()
    psutil.wait_procs(alive)
    return left


def _threads() -> set[threading.Thread]:
    # pyzmq has one, once something was sent, for the life of the process
    kept = (threading._DummyThread, GarbageCollectorThread)
    return {thread for thread in threading.enumerate() if not isinstance(thread, kept)}


def _join_threads(threads: set[threading.Thread]) -> set[threading.Thread]:
    deadline = time.monotonic() + GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


def _open_files() -> set[tuple[int, str]]:
    """Files, pipes and sockets by descriptor; without devices and event queues, which libraries keep once
    they are used."""
    # Python's, for the life of the process
    own = {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the directory that is being listed
            continue
        if int(name) not in own and not target.startswith(
            ("/dev/null", "/dev/urandom", "/dev/pts", "/dev/nvidia", "anon_inode:", "/proc/")
        ):
            found.add((int(name), target))
    return found


def _still_open(files: set[tuple[int, str]]) -> set[tuple[int, str]]:
    gc.collect()
    return files & _open_files()


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _inode(name: str) -> str:
    try:
        return str(Path("/dev/shm", name).stat().st_ino)
    except OSError:  # gone meanwhile
        return ""


def _own_segments(names: set[str]) -> set[str]:
    """Those that are left and that no process outside this test run holds."""
    gc.collect()
    names &= _segments()
    if not names:
        return names
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        if process.pid not in own:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:  # ended meanwhile, or another user's
                continue
            # by their inodes: a semaphore is mapped under a name that it had for a moment
            held = {line.split()[4] for line in maps.splitlines() if "/dev/shm/" in line}
            names = {name for name in names if (inode := _inode(name)) and inode not in held}
    for name in names:
        Path("/dev/shm", name).unlink(missing_ok=True)
    return names


def _temporary_files() -> set[Path]:
    # torch's compiler keeps headers beside the directory that it is told, until the process ends
    names = [name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("torchinductor_")]
    return {Path(tempfile.gettempdir(), name) for name in names}


def _working_files() -> set[Path]:
    return {Path.cwd() / name for name in os.listdir() if name not in CACHES}


def _left_files(paths: set[Path]) -> set[Path]:
    return {path for path in paths if path.exists()}


RESOURCES: dict[str, tuple[Callable[[], set[Any]], Callable[[set[Any]], set[Any]]]] = {
    "processes": (_children, _end_children),
    "threads": (_threads, _join_threads),
    "open files": (_open_files, _still_open),
    "segments in /dev/shm": (_segments, _own_segments),
    "temporary files": (_temporary_files, _left_files),
    "files in the working directory": (_working_files, _left_files),
}


@pytest.fixture
def kernels(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN has no LSTM of bfloat16 operands on CPUs without instructions for them."""
    if model == "lstm":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
