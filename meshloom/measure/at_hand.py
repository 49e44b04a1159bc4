"""The devices that plans are priced for: how many ranks, on which machine, with how many threads, over which
transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import DeviceError, MachineError, PlanError
from meshloom.launch.environment import threads_per_rank
from meshloom.machine.cores import cores
from meshloom.machine.machine import Machine, load, machine_file, save, this_machine
from meshloom.measure.calibration import CalibrationRequest, measure_machine
from meshloom.planner.pricing import Devices

MOST_RANKS = 8  # that are thought of unless more are asked for


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The user's request for devices.

    devices: auto, cpu, or a number of ranks. ranks: the most of them; None: one per core, up to `MOST_RANKS`.
    memory_bytes: of each rank; 0: its share of the host's. machine: the file of another machine.
    hosts: over which the ranks are spread, as many on each.
    """

    devices: str = "auto"
    ranks: int | None = None
    memory_bytes: int = 0
    transport: str = "auto"
    machine: Path | None = None
    hosts: int = 1

    def __post_init__(self) -> None:
        if self.devices.isdecimal():
            if self.ranks is not None and self.ranks != int(self.devices):
                raise PlanError(
                    f"--devices {self.devices} and --ranks {self.ranks} both say how many ranks. Leave one of them out."
                )
        elif self.devices not in ("auto", "cpu"):
            raise DeviceError(
                f"--devices {self.devices} cannot be priced: plans are rehearsed on CPUs. Use --devices cpu, or a number of ranks like --devices 4."
            )
        if self.num_ranks is not None and self.num_ranks < 1:
            raise PlanError(f"{self.num_ranks} ranks can run no plan. Use --ranks 1 or more.")
        if self.hosts < 1 or (self.hosts > 1 and (self.num_ranks is None or self.num_ranks % self.hosts)):
            raise PlanError(
                f"--hosts {self.hosts} cannot have as many ranks each of {self.num_ranks or 'no given number'}. Give --ranks, a multiple of the hosts."
            )

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks, from either setting."""
        return int(self.devices) if self.devices.isdecimal() else self.ranks


def devices_for(wish: Wish, least: int, tell: Callable[[str], None]) -> Devices | int:
    """The devices; the exit code if measuring this machine failed. least: the number of ranks of a plan that
    is to be priced.

    Raises `MachineError` for measurements over a transport other than the ranks', `DeviceError` for devices
    that cannot be priced.
    """
    if wish.devices == "auto" and torch.cuda.is_available():
        raise DeviceError(
            "Plans are rehearsed on CPUs, and here are GPUs, which other plans are best for. Use --devices cpu to price plans for the CPU."
        )
    num_ranks = max(wish.num_ranks or min(cores(), MOST_RANKS), least)
    if num_ranks % wish.hosts:
        raise PlanError(
            f"{num_ranks} ranks cannot be spread evenly over {wish.hosts} hosts. Give --ranks, a multiple of the hosts."
        )
    ranks_here = num_ranks // wish.hosts
    transport = "gloo" if wish.transport == "gloo" or why_not() else "shm"
    here = this_machine("cpu")
    if wish.machine is not None:
        machine = load(wish.machine)
    elif here is not None:
        machine = here
    else:
        tell(
            f"this machine is not measured yet; measuring it for up to {max(2, ranks_here)} ranks (half a minute), into {machine_file('cpu')}"
        )
        measured = measure_machine(
            CalibrationRequest(devices="cpu", ranks=max(2, ranks_here), transport=wish.transport),
            lambda done, of: tell(f"measuring this machine: {done} of {of} numbers of ranks"),
        )
        if isinstance(measured, int):
            return measured
        save(measured, machine_file("cpu"))
        machine = measured
    _check(machine, transport, num_ranks, wish)
    if wish.machine is not None and here is None and machine_file("cpu").name != f"{machine.name}-cpu.json":
        raise MachineError(
            f"Plans are rehearsed here and priced for {machine.name} by comparing both machines, and this one was not measured. Run meshloom calibrate first."
        )
    return Devices(
        num_ranks=num_ranks,
        machine=machine,
        threads_of=lambda ranks: threads_per_rank(min(ranks, ranks_here)),
        common_memory=transport == "shm" and wish.hosts == 1,
        hosts=wish.hosts,
        memory_bytes=wish.memory_bytes,
        here=here,
    )


def _check(machine: Machine, transport: str, num_ranks: int, wish: Wish) -> None:
    if machine.device != "cpu":
        raise MachineError(
            f"{wish.machine or machine_file(machine.device)} is of {machine.device}, and plans are rehearsed on CPUs. Give one of a CPU."
        )
    if num_ranks > 1 and not machine.links:
        raise MachineError(
            f"The machine {machine.name} was calibrated with one rank, so nothing is known of links. Run meshloom calibrate --ranks {num_ranks}."
        )
    if wish.hosts > 1 and not any(link.place == "between" for link in machine.links):
        raise MachineError(
            f"Nothing is known of links between hosts: {machine.name} was calibrated on one. Run meshloom calibrate under torchrun on {wish.hosts} hosts, and "
            "give its file with --machine."
        )
    if num_ranks > 1 and machine.transport.partition("+")[0] != transport:
        option = " --transport gloo" if transport == "gloo" else ""
        raise MachineError(
            f"The links of {machine.name} were measured over {machine.transport or 'nothing that is known'}, and ranks here talk over {transport}. "
            f"Run meshloom calibrate{option}, or price with --transport gloo if that is what they will use."
        )
