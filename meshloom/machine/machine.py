"""What a machine does: measured seconds of operators by kind and size, and of collectives by kind and bytes.

Values only; `planner/measure/machine_measurement.py` measures them. The seconds of an operator come from a
measured curve; between its points they are interpolated on logarithmic scales:

    seconds          .  <- beyond the last point: the last point's rate
        |        .
        |  ....            below the first point: what a call costs, however small
        +-------------- work (FLOPs of matrix products, attention and convolutions, else bytes moved)
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from meshloom.core.errors import MachineError
from meshloom.machine.links import (
    COLLECTIVES,
    Collective,
    Link,
    Where,
    is_positive,
    links_of,
    points_of,
    seconds_of,
)

# Kinds of operators that share a curve: counted in FLOPs, or in bytes read and written.
_Computing = Literal["matmul", "attention", "convolution"]
_Moving = Literal["elementwise", "activation", "normalization", "softmax", "reduction", "gather", "draw"]
Kind = Literal[_Computing, _Moving]
KINDS: tuple[Kind, ...] = get_args(Kind)
COUNTED_IN_FLOPS: frozenset[Kind] = frozenset(get_args(_Computing))
SCHEMA = 2  # of the file
DISK_RATE = 5e8  # bytes per second of a disk that was not measured


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Seconds of one kind of operator in one dtype.

    dtype: as torch writes it, like "float32".
    backward: whether of the operator's backward; work is then the backward's.
    points: (work, seconds), work ascending.
    spread: of repeated measurements: median over lower quartile, minus 1, at the worst point.
    """

    kind: Kind
    dtype: str
    backward: bool
    points: tuple[tuple[float, float], ...]
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MachineError(
                f"An operation of kind {self.kind!r} is not known. Kinds are {', '.join(KINDS)}."
            )
        works = [work for work, _ in self.points]
        positive = all(is_positive(work) and is_positive(seconds) for work, seconds in self.points)
        if not works or not positive or works != sorted(set(works)):
            raise MachineError(
                f"The points of {self.kind} in {self.dtype} must be (work, seconds) above 0 with ascending work, and are {self.points}."
            )

    @property
    def rate(self) -> float:
        """Work per second at the largest point: FLOP/s or bytes/s."""
        work, seconds = self.points[-1]
        return work / seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine and one kind of its devices, as measured.

    name: of the host. device: "cpu" or "cuda". model: the device's own name. memory_bytes: of one device.
    devices: of that kind (CPU: 1). cores, threads: of the CPU; threads of each rank during the measurement.
    measured_at: seconds since 1970.
    call_seconds, backward_call_seconds: of an operator that moves no data, like a view.
    ranks: how many measured `operations` at the same time.
    transport: of the measured links: shm, gloo, nccl, or shm+gloo between hosts; "": there are none.
    disk_bytes_per_second: of the disk for temporary files, reading as much as writing; 0: not measured.
    """

    name: str
    device: Literal["cpu", "cuda"]
    model: str
    devices: int
    cores: int
    threads: int
    memory_bytes: int
    measured_at: float
    call_seconds: float
    backward_call_seconds: float
    operations: tuple[Operation, ...]
    links: tuple[Link, ...] = ()
    ranks: int = 1
    transport: str = ""
    disk_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise MachineError(f"A machine of device {self.device!r} is not known. Devices are cpu and cuda.")
        if not is_positive(self.call_seconds) or not is_positive(self.backward_call_seconds):
            raise MachineError(
                f"A call of {self.call_seconds!r} s forward and {self.backward_call_seconds!r} s backward was not measured. Calibrate again."
            )
        if self.disk_bytes_per_second and not is_positive(self.disk_bytes_per_second):
            raise MachineError(
                f"A disk of {self.disk_bytes_per_second!r} bytes per second was not measured. Calibrate again."
            )
        missing = [kind for kind in KINDS for backward in (False, True) if not self._curves(kind, backward)]
        if missing:
            raise MachineError(
                f"The machine {self.name} lacks measurements of {', '.join(dict.fromkeys(missing))}. Calibrate again."
            )

    def _curves(self, kind: Kind, backward: bool) -> dict[str, Operation]:
        return {
            each.dtype: each for each in self.operations if each.kind == kind and each.backward == backward
        }

    @property
    def disk_rate(self) -> float:
        """Bytes per second that the disk reads and writes, as much of one as of the other: measured, or assumed."""
        return self.disk_bytes_per_second or DISK_RATE

    def slowdown(self, busy: float, threads: int) -> float:
        """How much longer a rank with so many threads takes when `busy` ranks compute, than alone: they share a CPU's cores
        evenly.

        >>> [example_machine().slowdown(busy, 1) for busy in (1, 2, 3, 4)]  # on two cores
        [1.0, 1.0, 1.5, 2.0]
        """
        return max(1.0, busy * min(threads, self.cores) / self.cores) if self.device == "cpu" else 1.0

    def operation(self, kind: Kind, dtype: str, *, backward: bool = False) -> Operation:
        """The curve of a kind; for an unmeasured dtype, one of the same width, else float32's, else any."""
        curves = self._curves(kind, backward)
        width = _width(dtype)
        return (
            curves.get(dtype)
            or next((each for each in curves.values() if _width(each.dtype) == width), None)
            or curves.get("float32")
            or next(iter(curves.values()))
        )


def operator_seconds(
    machine: Machine,
    kind: Kind,
    dtype: str,
    *,
    flops: float = 0.0,
    num_bytes: float = 0.0,
    backward: bool = False,
) -> float:
    """Predicted seconds of one call of an operator.

    Operators counted in FLOPs take at least as long as their bytes would (the roofline of Williams et al.,
    2009).
    flops, num_bytes: of its forward, or of its backward; bytes read and written, each element once.

    >>> machine = example_machine()
    >>> operator_seconds(machine, "matmul", "float32", flops=2e9)
    2.0
    >>> operator_seconds(machine, "elementwise", "float32", num_bytes=1e3)
    1e-06
    """
    own = machine.operation(kind, dtype, backward=backward)
    if kind not in COUNTED_IN_FLOPS:
        return _on_curve(own.points, num_bytes)
    moving = machine.operation("elementwise", dtype, backward=backward)
    return max(_on_curve(own.points, flops), _on_curve(moving.points, num_bytes))


def collective_seconds(
    machine: Machine, collective: Collective, num_bytes: float, ranks: int, *, among: int | None = None, place: Where | None = None, in_place: bool = False
) -> float:  # fmt: skip
    """Predicted seconds of a collective of `ranks` ranks, each handing in `num_bytes`: `links.seconds_of`.
    Raises `MachineError` if none was measured.

    >>> machine = example_machine()
    >>> collective_seconds(machine, "all_reduce", 1e9, 2), collective_seconds(machine, "all_reduce", 1e9, 4)
    (1.001, 1.503)
    """
    if ranks == 1:
        return 0.0
    found = seconds_of(
        machine.links, collective, num_bytes, ranks, among=among, place=place, in_place=in_place
    )
    if found is None:
        raise MachineError(
            f"The machine {machine.name} has no measured {collective}: it was calibrated with one rank. Calibrate with --ranks 2 or more."
        )
    return found


def save(machine: Machine, path: Path) -> None:
    """Writes the machine as JSON, atomically. Raises `MachineError` if the path cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(
                json.dumps({"schema": SCHEMA, **asdict(machine)}, indent=1) + "\n", encoding="utf-8"
            )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"The measurements cannot be written to {path}: {error.strerror}. Give another file with --out FILE."
        ) from None


def machine_file(device: str) -> Path:
    """The default path of this machine's measurements; one file for each kind of device."""
    return Path.home() / ".cache" / "meshloom" / "machines" / f"{platform.node() or 'unnamed'}-{device}.json"


def this_machine(device: str) -> Machine | None:
    """This machine's `meshloom calibrate`; None if there is none. Raises `MachineError` for a broken file."""
    path = machine_file(device)
    return load(path) if path.is_file() else None


def load(path: Path) -> Machine:
    """The machine saved in a file. Raises `MachineError` for a missing, broken or foreign one."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(
            f"There are no measurements in {path}: {error.strerror}. Make them with meshloom calibrate."
        ) from None
    except ValueError:
        raise MachineError(f"{path} is no JSON. Make it again with meshloom calibrate.") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise MachineError(
            f"{path} does not hold a machine's measurements. Make it again with meshloom calibrate."
        )
    if found["schema"] != SCHEMA:
        raise MachineError(
            f"{path} has version {found['schema']} of the measurements, and this meshloom reads {SCHEMA}. Run meshloom calibrate again."
        )
    try:
        return _machine(found)
    except MachineError as error:
        raise MachineError(f"{path} is broken: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise MachineError(f"{path} is broken ({error}). Make it again with meshloom calibrate.") from None


def example_machine() -> Machine:
    """A machine with round numbers for examples: 1e9 FLOP/s, 1e9 bytes/s, 1 us a call; an all-reduce of two
    ranks at 1e9 bytes/s after 1 ms."""
    operations = [
        Operation(kind=kind, dtype="float32", backward=backward, points=((1e3, 1e-6), (1e9, 1.0)))
        for kind in KINDS
        for backward in (False, True)
    ]
    links = [
        Link(collective=each, ranks=2, latency_seconds=1e-3, bytes_per_second=1e9, residual=0.0)
        for each in COLLECTIVES
    ]
    return Machine(
        name="example", device="cpu", model="example", devices=1, cores=2, threads=1, memory_bytes=2**30, measured_at=0.0,
        call_seconds=1e-6, backward_call_seconds=1e-6, operations=tuple(operations), links=tuple(links),
    )  # fmt: skip


def _on_curve(points: Sequence[tuple[float, float]], work: float) -> float:
    """Seconds at `work`: constant below the first point, log-linear between points, then the last rate.

    >>> _on_curve([(10, 1.0), (1000, 100.0)], 100), _on_curve([(10, 1.0), (1000, 100.0)], 1), _on_curve([(10, 1.0), (1000, 100.0)], 2000)
    (10.0, 1.0, 200.0)
    """
    if work <= points[0][0]:
        return points[0][1]
    if work >= points[-1][0]:
        return points[-1][1] * work / points[-1][0]
    above = next(index for index, (each, _) in enumerate(points) if each > work)
    (low, low_seconds), (high, high_seconds) = points[above - 1], points[above]
    share = math.log(work / low) / math.log(high / low)
    return round(low_seconds * (high_seconds / low_seconds) ** share, 15)


def _machine(found: Mapping[str, Any]) -> Machine:
    # "crowds" are of earlier versions, which measured how much ranks slow each other down
    fields = {key: value for key, value in found.items() if key not in ("schema", "crowds")}
    operations: Any = tuple(
        Operation(**{**each, "points": points_of(each["points"])}) for each in found["operations"]
    )
    links: Any = links_of(found["links"])
    return Machine(**{**fields, "links": links, "operations": operations})


def _width(dtype: str) -> str:
    """The digits of a dtype's name: those of bfloat16 and float16 are the same."""
    return "".join(letter for letter in dtype if letter.isdigit())
