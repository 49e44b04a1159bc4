"""Opens the world of a mesh: joins the other processes if this is a rank, else simulates all ranks here."""

from __future__ import annotations

from datetime import timedelta

from meshloom.core.errors import DeviceError, PlanError
from meshloom.core.mesh import Mesh
from meshloom.core.units import format_count
from meshloom.launch.allocator import keep_freed_memory
from meshloom.launch.devices import check_devices, check_ranks
from meshloom.launch.environment import launched_rank, launched_timeout, launched_transport
from meshloom.launch.joining import join
from meshloom.launch.names import sizes
from meshloom.launch.one_process import world_in_one_process
from meshloom.launch.transport import check_transport
from meshloom.launch.world import World

MOST_SECONDS = 1e7  # a timeout: 115 days


def open_world(
    mesh: Mesh, devices: str = "auto", timeout_seconds: float | None = None, transport: str = "auto",
    *, ring: bool = False, oversubscribe: bool = False, saving: bool = False,
) -> World:  # fmt: skip
    """Join the other processes if this one was started as a rank; otherwise keep all ranks in this process.

    devices: one of `DEVICES`.
    timeout_seconds: how long a rank waits for the others, when it joins and in every collective; None: as
        the launcher says, or 600.
    transport: of processes, one of `TRANSPORTS`.
    ring: whether gradients are added up on a ring of messages, in place of the transport's own all-reduce.
    oversubscribe: whether there may be more than `MOST_SIMULATED` simulated ranks.
    saving: whether a thread of each rank saves checkpoints beside training.
    Raises `PlanError` if the mesh does not have the size of the started processes, `DeviceError` if devices
    or transport are missing.
    """
    check_devices(devices)
    check_transport(transport)
    timeout_seconds = launched_timeout() if timeout_seconds is None else timeout_seconds
    check_timeout(timeout_seconds, "timeout_seconds=")
    launched = launched_rank()
    size = launched.size if launched else 1
    if size > 1 and devices.startswith("simulated"):
        raise DeviceError(
            f"devices={devices} keeps all ranks in one process, but {size} processes were started. Start one, or use devices=cpu."
        )
    if launched and mesh.size != size:
        started = f"{format_count(size, 'process')} {'was' if size == 1 else 'were'}"
        raise PlanError(
            f"The plan needs {format_count(mesh.size, 'rank')} ({sizes(mesh)}), but {started} started. "
            f"Start {mesh.size} (torchrun --nproc-per-node {mesh.size} on one machine), or use a plan of {size}, like dp={size}."
        )
    several = launched if size > 1 else None
    if not several and mesh.size > 1:
        if devices in ("cpu", "cuda"):
            way_out = f"Start it with meshloom train or torchrun --nproc-per-node {mesh.size}, or use devices=simulated, which keeps all ranks in one process."
            raise DeviceError(
                f"devices={devices} has a process for each of {mesh.size} ranks ({sizes(mesh)}), and this program is one. {way_out}"
            )
        check_ranks(mesh.size, "simulated", oversubscribe)
    timeout = timedelta(seconds=timeout_seconds)
    if several:
        world = join(mesh, several, devices, timeout, transport, ring=ring, saving=saving)
    else:
        of_a_host = launched_transport(transport) != "gloo"
        world = world_in_one_process(mesh, devices, of_a_host=of_a_host, ring=ring, saving=saving)
    if world.local[0].device.type == "cpu":
        keep_freed_memory()
    return world


def check_timeout(seconds: object, name: str) -> None:
    """Raises `DeviceError` unless `seconds` is a valid timeout. name: the user's, up to the value."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        raise DeviceError(
            f"{name}{seconds!r} must be a number of seconds, more than 0 and at most {MOST_SECONDS:,.0f}: how long a rank waits for another."
        )
