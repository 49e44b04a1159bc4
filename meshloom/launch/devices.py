"""The choice of devices for the ranks of a mesh, with its reason, before anything is started."""

from __future__ import annotations

from typing import Literal

import torch

from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Mesh
from meshloom.core.units import format_count
from meshloom.launch.environment import launched_rank, threads_per_rank
from meshloom.launch.names import visible_gpus
from meshloom.machine.cores import cores

Kind = Literal["cuda", "cpu", "simulated"]
# each needs 0.3 GiB for Python and torch, and seconds of a core to start; more only wait for each other
PROCESSES_PER_CORE = 8
# ranks in one process: each has parameters, an optimizer and, where the loss is captured, a thread
MOST_SIMULATED = 256
DEVICES = ("auto", "cuda", "cpu", "simulated", "simulated:cuda")


def choose_devices(mesh: Mesh, devices: str = "auto", oversubscribe: bool = False) -> tuple[Kind, str]:
    """The devices for the ranks of `mesh` on this machine, and a line with the reason: GPUs if there is one
    for each rank; otherwise CPU processes if there is a core for each; otherwise simulated.

    oversubscribe: whether there may be more ranks than this machine can reasonably run.
    Raises `DeviceError` if the requested devices are missing, or if there are more ranks than that.
    """
    check_devices(devices)
    num_gpus, num_cores, size = torch.cuda.device_count(), cores(), mesh.size
    ranks, on_cores = format_count(size, "rank"), format_count(num_cores, "core")
    if devices == "cuda" and size > num_gpus:
        smaller = f", or a plan of at most {format_count(num_gpus, 'rank')}" if num_gpus else ""
        instead = f"devices=cpu or devices=simulated{smaller}"
        raise DeviceError(
            f"devices=cuda needs {format_count(size, 'GPU')}, one for each rank, and {visible_gpus(num_gpus)}. Use {instead}."
        )
    if devices == "simulated:cuda" and not num_gpus:
        raise DeviceError("devices=simulated:cuda needs a GPU, and none is visible. Use devices=simulated.")
    reason = "asked for" if devices != "auto" else visible_gpus(num_gpus)
    if devices == "cuda" or (devices == "auto" and size <= num_gpus):
        return "cuda", f"cuda: {ranks}, one GPU each ({reason})"
    if devices == "cpu" or (devices == "auto" and size <= num_cores):
        check_ranks(size, "cpu", oversubscribe)
        threads = format_count(threads_per_rank(size), "thread")
        return "cpu", f"cpu: {ranks} as process{'es' * (size > 1)} on {on_cores}, {threads} each ({reason})"
    check_ranks(size, "simulated", oversubscribe)
    if devices == "auto":
        reason += f", and {ranks} are more than {on_cores}"
    used = format_count(num_gpus, "GPU") if ":" in devices else on_cores
    return "simulated", f"simulated: {ranks} in one process on {used} ({reason})"


def choose_for_workers(
    num_servers: int, num_workers: int, devices: str = "auto", virtual: bool = False, *, oversubscribe: bool = False
) -> tuple[Kind, str]:  # fmt: skip
    """The devices of an asynchronous run: processes if there is a core for each worker, otherwise simulated.

    virtual: whether options of the virtual clock are given. oversubscribe: as for `choose_devices`.
    Raises `DeviceError` for devices that it cannot have.
    """
    check_devices(devices)
    on_cores = format_count(cores(), "core")
    if devices == "cuda":
        raise DeviceError(
            "exchange=async trains on CPU processes or simulated devices, not on devices=cuda. Use devices=cpu or devices=simulated."
        )
    who = f"{format_count(num_servers, 'server')} and {format_count(num_workers, 'worker')}"
    if devices == "cpu" or (devices == "auto" and not virtual and num_workers <= cores()):
        check_ranks(num_servers + num_workers, "cpu", oversubscribe)
        reason = "asked for" if devices == "cpu" else "a core for each worker"
        threads = format_count(threads_per_rank(num_workers), "thread")
        return "cpu", f"cpu: {who} as processes on {on_cores}, {threads} each ({reason})"
    check_ranks(num_servers + num_workers, "simulated", oversubscribe)
    reason = f"{format_count(num_workers, 'worker')} are more than {on_cores}"
    if devices != "auto" or virtual:
        reason = "asked for" if devices != "auto" else "on a virtual clock"
    return "simulated", f"simulated: {who} in one process ({reason})"


def check_ranks(size: int, kind: Kind, oversubscribe: bool) -> None:
    """Raises `DeviceError` for more ranks than this machine can reasonably run, unless `oversubscribe`."""
    most = MOST_SIMULATED if kind == "simulated" else PROCESSES_PER_CORE * max(2, cores())
    if oversubscribe or kind == "cuda" or size <= most:
        return
    why = f"{size:,} processes on {format_count(cores(), 'core')} would mostly wait for each other, at 0.3 GiB each"
    if kind == "simulated":
        why = f"{size:,} simulated ranks would all be in this process, each with its parameters and an optimizer"
    raise DeviceError(
        f"{why}, and {most} are the most that make sense. Use a plan of at most {most} ranks, or, if you mean it, "
        "--oversubscribe (in Python oversubscribe=True)."
    )


def default_ranks(devices: str = "auto") -> int:
    """The number of ranks when no plan is given: those that were started, else one for each GPU, else one."""
    check_devices(devices)
    launched = launched_rank()
    if launched:
        return launched.size
    return max(1, torch.cuda.device_count()) if devices in ("auto", "cuda", "simulated:cuda") else 1


def check_devices(devices: str) -> None:
    """Raises `DeviceError` if `devices` is none of `DEVICES`."""
    if devices not in DEVICES:
        raise DeviceError(f"devices={devices} is not known. Use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}.")
