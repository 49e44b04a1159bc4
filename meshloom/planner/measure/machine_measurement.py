"""Measures this machine in a few seconds: its operators, and with `collective_timings.py` its collectives.

All ranks measure at the same time, because they share caches and memory in training too.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshloom.machine.host_memory import total_bytes
from meshloom.machine.links import Link
from meshloom.machine.machine import Kind, Machine, Operation
from meshloom.planner.measure.operator_chains import Chain, chains_of, views
from meshloom.planner.measure.timing import now, typical

OPERATOR_SECONDS = 2.0  # about what all operators take, without making their tensors
ROUNDS = 2  # over all operators, so that what disturbs the machine for a while disturbs one round
RUNS = (1, 70)  # least and most repetitions of a chain in a round


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What `measure_operators` found, in the terms of `Machine`."""

    operations: tuple[Operation, ...]
    call_seconds: float
    backward_call_seconds: float


def measure_operators(
    device: torch.device, *, seconds: float = OPERATOR_SECONDS, rounds: int = ROUNDS
) -> Operators:
    """Seconds of each kind of operator at a few sizes, forward and backward. seconds: about the total time,
    in so many rounds."""
    timed: dict[tuple[Kind, torch.dtype], list[_Timed]] = {}
    for kind, dtype, chain in chains_of(device):
        timed.setdefault((kind, dtype), []).append(_Timed(chain))
    call = _Timed(views(device))
    everything = [*(each for members in timed.values() for each in members), call]
    for _ in range(rounds):
        for each in everything:
            each.repeat(device, seconds / rounds / len(everything))
    found: list[Operation] = []
    for (kind, dtype), members in timed.items():
        for backward in (False, True):
            results = [each.result(backward=backward) for each in members]
            works = [each.chain.backward_work if backward else each.chain.work for each in members]
            points = _rising(zip(works, (duration for duration, _ in results), strict=True))
            spread = round(max(each for _, each in results), 4)
            name = str(dtype).removeprefix("torch.")
            found.append(Operation(kind=kind, dtype=name, backward=backward, points=points, spread=spread))
    return Operators(
        operations=tuple(found),
        call_seconds=call.result(backward=False)[0],
        backward_call_seconds=call.result(backward=True)[0],
    )


def machine_of(
    operators: Operators,
    links: Sequence[Link],
    device: torch.device,
    *,
    cores: int,
    ranks: int = 1,
    transport: str = "",
    disk: float = 0.0,
) -> Machine:
    """The machine that this process runs on, with its measurements; operators were measured by so many ranks
    at the same time. disk: its bytes per second."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind, model, memory = "cuda", str(properties.name), int(properties.total_memory)
        devices = torch.cuda.device_count()
    else:
        kind, model, devices = "cpu", _processor(), 1
        memory = total_bytes()
    return Machine(
        name=platform.node() or "unnamed",
        device=kind,
        model=model,
        devices=devices,
        cores=cores,
        threads=torch.get_num_threads(),
        memory_bytes=memory,
        measured_at=time.time(),
        call_seconds=operators.call_seconds,
        backward_call_seconds=operators.backward_call_seconds,
        operations=operators.operations,
        links=tuple(links),
        ranks=ranks,
        transport=transport,
        disk_bytes_per_second=disk,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )


class _Timed:
    """A chain, and how long its forward and backward took."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._ahead: list[float] = []
        self._back: list[float] = []

    def result(self, *, backward: bool) -> tuple[float, float]:
        """Typical seconds of one operator, and their spread."""
        return typical(self._back if backward else self._ahead)

    def repeat(self, device: torch.device, seconds: float) -> None:
        """Run for about that long. The first run warms up and does not count."""
        self._run(device)
        deadline = time.perf_counter() + seconds
        for number in range(RUNS[1]):
            if number >= RUNS[0] and time.perf_counter() > deadline:
                break
            ahead, back = self._run(device)
            self._ahead.append(ahead)
            self._back.append(back)

    def _run(self, device: torch.device) -> tuple[float, float]:
        started = now(device)
        outputs = self.chain.run()
        middle = now(device)
        gradients = [torch.ones_like(each) for each in outputs]
        before = now(device)
        torch.autograd.grad(outputs, self.chain.inputs, gradients)
        return (middle - started) / self.chain.length, (now(device) - before) / self.chain.length


def _rising(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """More work takes no less time: where noise contradicts that, the smaller work gets the shorter time of
    the larger one.

    >>> _rising([(1, 2.0), (10, 1.0), (100, 5.0)])
    ((1, 1.0), (10, 1.0), (100, 5.0))
    """
    result: list[tuple[float, float]] = []
    for work, seconds in reversed(list(points)):
        result.append((work, min(seconds, result[-1][1]) if result else seconds))
    return tuple(reversed(result))
