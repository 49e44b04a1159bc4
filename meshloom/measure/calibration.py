"""Measures the machine, with as many ranks as a plan may have, once for each number of ranks; the results are
one `Machine`.

    alone             operators with all cores of this process
    2 ranks           their collectives
    4 ranks           the same; collectives of pairs while there are four; operators of four at once

Each number of ranks has processes of its own, with the threads that ranks of a plan of that size have.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshloom.comm.objects import collect
from meshloom.core.errors import PlanError
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.launch.devices import choose_devices, default_ranks
from meshloom.launch.opening import open_world
from meshloom.launch.processes.launcher import run_ranks
from meshloom.launch.transport import host_identity
from meshloom.launch.world import World
from meshloom.machine.cores import cores
from meshloom.machine.links import Link, Where, links_of
from meshloom.machine.machine import Machine, load
from meshloom.optimizer.offload import directory_for
from meshloom.planner.measure.collective_timings import measure_links, measure_ring, transport_of
from meshloom.planner.measure.disk_rate import measure_disk
from meshloom.planner.measure.machine_measurement import machine_of, measure_operators

MOST_RANKS = 8  # on CPUs, unless more are asked for


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """What to measure, and how.

    devices: auto, cpu or cuda. ranks: the most; None: one per GPU, on CPUs one per core up to `MOST_RANKS`.
    transport: of `launch.transport.TRANSPORTS`.
    """

    devices: str = "auto"
    ranks: int | None = None
    transport: str = "auto"
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise PlanError(f"--ranks {self.ranks} must be 1 or more.")

    @property
    def num_ranks(self) -> int:
        """The largest number of ranks that measure together."""
        if self.ranks is not None:
            return self.ranks
        return default_ranks("cuda") if self._on_gpus else min(cores(), MOST_RANKS)

    @property
    def _on_gpus(self) -> bool:
        return self.devices != "cpu" and torch.cuda.is_available()

    @property
    def kind(self) -> str:
        """cpu or cuda. Raises `DeviceError` if there is none."""
        if self._on_gpus:
            wanted = "cuda"
        else:
            wanted = self.devices if self.devices != "auto" else "cpu"
        return choose_devices(Mesh(dp=self.num_ranks), wanted)[0]


def measure_machine(
    request: CalibrationRequest, told: Callable[[int, int], None] = lambda done, of: None
) -> Machine | int:
    """Starts ranks for each number of them and measures. If they fail, returns their exit code, after they
    have printed why. told: called with the numbers of ranks that have been measured, and how many there are."""
    kind = request.kind
    numbers = numbers_of_ranks(request.num_ranks)
    if not numbers:
        return measure_here(replace(request, devices=kind, ranks=1))
    links: list[Link] = []  # of fewer ranks than most
    with tempfile.TemporaryDirectory(prefix="meshloom-") as directory:
        part = Path(directory) / "part.json"
        for place, number in enumerate(numbers):
            told(place, len(numbers))
            words = ["calibrate", "--devices", kind, "--transport", request.transport]
            words += ["--timeout", str(request.timeout_seconds)]
            words += ["--part" if number == numbers[-1] else "--links", str(part)]
            command, plan = [sys.executable, "-m", "meshloom", *words], Plan(dp=number)
            code = run_ranks(command, plan.mesh, kind, str(plan), transport=request.transport)
            if code:
                return code
            if number < numbers[-1]:
                links += links_of(json.loads(part.read_text(encoding="utf-8")))
        machine = load(part)
        return replace(machine, links=(*links, *machine.links))


def measure_here(request: CalibrationRequest) -> Machine:
    """What the ranks of this run measure together, of which this process is one; or this process alone."""
    num_ranks = default_ranks("cpu")
    with open_world(Mesh(dp=num_ranks), request.devices, request.timeout_seconds, request.transport) as world:
        here = world.local[0]
        operators = measure_operators(here.device)
        disk = measure_disk(directory_for(None)) if here.rank == 0 and here.device.type == "cpu" else 0.0
        links = _links_of_all(world)
        transport = transport_of(here.groups["dp"], here.device) if num_ranks > 1 else ""
    for size in range(2, num_ranks):
        if num_ranks % size == 0:
            mesh = Mesh(dp=num_ranks // size, tp=size)
            with open_world(mesh, request.devices, request.timeout_seconds, request.transport) as divided:
                links += _links(divided, {(each.ranks, each.place) for each in links})
    return machine_of(
        operators, links, here.device, cores=cores(), ranks=num_ranks, transport=transport, disk=disk
    )  # fmt: skip


def measure_links_here(request: CalibrationRequest) -> list[Link]:
    """What the ranks of this run measure of their links, of which this process is one."""
    with open_world(
        Mesh(dp=default_ranks("cpu")), request.devices, request.timeout_seconds, request.transport
    ) as world:
        return _links_of_all(world)


def _links_of_all(world: World) -> list[Link]:
    """Of a world whose ranks are all along dp; on CPUs the ring, too."""
    here = world.local[0]
    links, group = _links(world, set()), here.groups["dp"]
    if group.size > 1 and here.device.type == "cpu":
        place: Where = "inside" if len(set(_hosts(world))) == 1 else "between"
        links.append(measure_ring(group, here.device, place=place))
    return links


def numbers_of_ranks(most: int) -> list[int]:
    """The numbers that are measured: all up to four, then powers of two, and the largest.

    >>> numbers_of_ranks(1), numbers_of_ranks(4), numbers_of_ranks(12)
    ([], [2, 3, 4], [2, 3, 4, 8, 12])
    """
    return [
        number for number in range(2, most + 1) if number <= 4 or number == most or number & (number - 1) == 0
    ]


def _links(world: World, known: Set[tuple[int, Where]]) -> list[Link]:
    """The links of the groups that this rank is in; the other ranks of each make the same decisions. known:
    sizes and places that were measured before."""
    here, hosts = world.local[0], _hosts(world)
    measured = set(known)
    found: list[Link] = []
    for axis, group in here.groups.items():
        on_hosts = {hosts[rank] for rank in world.mesh.group_of(axis, here.rank)}
        place: Where = "inside" if len(on_hosts) == 1 else "between"
        if group.size > 1 and (group.size, place) not in measured:
            measured.add((group.size, place))
            found += measure_links(group, here.device, among=world.mesh.size, place=place)
    return found


def _hosts(world: World) -> list[str]:
    """An identifier of each rank's host, by rank."""
    return collect(world.local[0].world, host_identity())
