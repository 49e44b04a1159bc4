"""What a machine does: measured seconds of operators by kind and size, and of collectives by kind and bytes.

Values only. `planner/calibrate.py` measures them, and predictions are made of them. The seconds of an operator come from a measured
curve; between its points they are interpolated on logarithmic scales:

    seconds          .  <- beyond the last point: the last point's rate
        |        .
        |  ....            below the first point: what a call costs, however small
        +-------------- work (FLOPs of matrix products, attention and convolutions, else bytes read and written)
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

from meshloom.errors import MachineError

# Kinds of operators that share a curve. The first three are counted in FLOPs, the others in bytes read and written.
Kind = Literal["matmul", "attention", "convolution", "elementwise", "activation", "normalization", "softmax", "reduction", "gather", "draw"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COUNTED_IN_FLOPS: frozenset[Kind] = frozenset({"matmul", "attention", "convolution"})
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
SCHEMA = 1  # of the file


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Seconds of one kind of operator in one dtype.

    dtype: as torch writes it, like "float32".
    backward: of its backward instead; work is then the backward's.
    points: (work, seconds), work ascending.
    spread: how far repeated measurements lay apart: median over lower quartile, less 1, at the worst point.
    """

    kind: Kind
    dtype: str
    backward: bool
    points: tuple[tuple[float, float], ...]
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MachineError(f"An operation of kind {self.kind!r} is not known. Kinds are {', '.join(KINDS)}.")
        works = [work for work, _ in self.points]
        if not works or works != sorted(set(works)) or not all(_positive(work) and _positive(seconds) for work, seconds in self.points):
            raise MachineError(
                f"The points of {self.kind} in {self.dtype} must be (work, seconds) above 0 with ascending work, and are {self.points}."
            )

    @property
    def rate(self) -> float:
        """Work per second at the largest point: FLOP/s or bytes/s."""
        work, seconds = self.points[-1]
        return work / seconds


@dataclass(frozen=True, kw_only=True)
class Link:
    """Seconds of one collective among `ranks` ranks: latency_seconds + bytes / bytes_per_second, fitted to measurements.

    Bytes are those of the tensor that one rank hands in. residual: largest relative error of the fit.
    """

    collective: Collective
    ranks: int
    latency_seconds: float
    bytes_per_second: float
    residual: float

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise MachineError(f"A link of {self.collective!r} is not known. Collectives are {', '.join(COLLECTIVES)}.")
        if not isinstance(self.ranks, int) or self.ranks < 2:
            raise MachineError(f"{self.collective} among {self.ranks!r} ranks is no link. Give 2 ranks or more.")
        if not _number(self.latency_seconds) or self.latency_seconds < 0 or not _positive(self.bytes_per_second):
            raise MachineError(
                f"{self.collective} among {self.ranks} ranks takes {self.latency_seconds!r} s and {self.bytes_per_second!r} bytes/s, "
                "which are no latency and no rate. Calibrate again."
            )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine and one kind of its devices, as measured.

    name: of the host. device: "cpu" or "cuda". model: the device's own name.
    devices: how many of that kind (CPU: 1). cores, threads: of the CPU; threads of each rank while it was measured.
    memory_bytes: of one device.
    measured_at: seconds since 1970.
    call_seconds, backward_call_seconds: of an operator that moves nothing, like a view.
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

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise MachineError(f"A machine of device {self.device!r} is not known. Devices are cpu and cuda.")
        if not _positive(self.call_seconds) or not _positive(self.backward_call_seconds):
            raise MachineError(
                f"A call of {self.call_seconds!r} s forward and {self.backward_call_seconds!r} s backward was not measured. Calibrate again."
            )
        missing = [kind for kind in KINDS for backward in (False, True) if not self._curves(kind, backward)]
        if missing:
            raise MachineError(f"The machine {self.name} lacks measurements of {', '.join(dict.fromkeys(missing))}. Calibrate again.")

    def _curves(self, kind: Kind, backward: bool) -> dict[str, Operation]:
        return {each.dtype: each for each in self.operations if each.kind == kind and each.backward == backward}

    def operation(self, kind: Kind, dtype: str, *, backward: bool = False) -> Operation:
        """The curve of a kind; for a dtype that was not measured, that of one of the same width, else float32's, else any."""
        curves = self._curves(kind, backward)
        width = _width(dtype)
        return (
            curves.get(dtype)
            or next((each for each in curves.values() if _width(each.dtype) == width), None)
            or curves.get("float32")
            or next(iter(curves.values()))
        )


def operator_seconds(machine: Machine, kind: Kind, dtype: str, *, flops: float = 0.0, num_bytes: float = 0.0, backward: bool = False) -> float:
    """Predicted seconds of one call of an operator.

    What is counted in FLOPs takes at least as long as its bytes would (the roofline model of Williams et al., 2009).
    flops, num_bytes: of its forward, or of its backward. num_bytes: read and written, each element once.

    >>> machine = example_machine()
    >>> operator_seconds(machine, "matmul", "float32", flops=2e9)
    2.0
    >>> operator_seconds(machine, "elementwise", "float32", num_bytes=1e3)
    1e-06
    """
    bytes_seconds = _on_curve(machine.operation("elementwise" if kind in COUNTED_IN_FLOPS else kind, dtype, backward=backward).points, num_bytes)
    if kind not in COUNTED_IN_FLOPS:
        return bytes_seconds
    operation = machine.operation(kind, dtype, backward=backward)
    return max(_on_curve(operation.points, flops), bytes_seconds)


def collective_seconds(machine: Machine, collective: Collective, num_bytes: float, ranks: int) -> float:
    """Predicted seconds of a collective of `ranks` ranks, each handing in `num_bytes`. Raises `MachineError` if none was measured.

    For a number of ranks that was not measured, the nearest one's latency and bytes are scaled by the steps of a ring and what it
    moves: an all-reduce takes 2(N-1) steps and moves 2(N-1)/N of the bytes (Patarasuk & Yuan, 2009).

    >>> machine = example_machine()
    >>> collective_seconds(machine, "all_reduce", 1e9, 2)
    1.001
    >>> collective_seconds(machine, "all_reduce", 1e9, 4)
    1.503
    """
    if ranks == 1:
        return 0.0
    found = [link for link in machine.links if link.collective == collective]
    if not found:
        raise MachineError(
            f"The machine {machine.name} has no measured {collective}: it was calibrated with one rank. Calibrate with --ranks 2 or more."
        )
    link = min(found, key=lambda each: abs(math.log(each.ranks / ranks)))
    steps, moved = _ring(collective, ranks)
    measured_steps, measured_moved = _ring(collective, link.ranks)
    return link.latency_seconds * steps / measured_steps + num_bytes / link.bytes_per_second * moved / measured_moved


def fit_link(collective: Collective, ranks: int, measured: Sequence[tuple[float, float]]) -> Link:
    """The line through (bytes, seconds) that has the least relative squared error.

    >>> fit_link("send", 2, [(1e3, 0.002), (1e6, 1.001)])
    Link(collective='send', ranks=2, latency_seconds=0.001, bytes_per_second=1000000.0, residual=0.0)
    """
    # Minimise sum(((a + b x) / y - 1)^2): the normal equations with u = 1/y and v = x/y. Sizes differ by thousands, so errors are relative.
    pairs = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in measured]
    uu, uv, vv = (sum(one[i] * one[j] for one in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = sum(one[0] for one in pairs), sum(one[1] for one in pairs)
    determinant = uu * vv - uv * uv
    latency, per_byte = ((u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant) if determinant > 1e-12 * uu * vv else (0.0, v / vv)
    if latency < 0:
        latency, per_byte = 0.0, v / vv
    elif per_byte <= 0:  # noise: a larger message was not slower
        latency, per_byte = 0.0, max(seconds / num_bytes for num_bytes, seconds in measured[-1:])
    residual = max(abs((latency + per_byte * num_bytes) / seconds - 1) for num_bytes, seconds in measured)
    return Link(
        collective=collective,
        ranks=ranks,
        latency_seconds=round(latency, 12),
        bytes_per_second=float(f"{1 / per_byte:.6g}"),
        residual=round(residual, 6),
    )


def save(machine: Machine, path: Path) -> None:
    """Write the machine as JSON, whole or not at all. Raises `MachineError` if that place cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps({"schema": SCHEMA, **asdict(machine)}, indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"The measurements cannot be written to {path}: {error.strerror}. Give another file with --out FILE.") from None


def machine_file(device: str) -> Path:
    """Where this machine's measurements lie unless another place is named; one file for each kind of device."""
    return Path.home() / ".cache" / "meshloom" / "machines" / f"{platform.node() or 'unnamed'}-{device}.json"


def this_machine(device: str) -> Machine | None:
    """What `meshloom calibrate` measured on this machine, if it did. Raises `MachineError` for a broken file."""
    path = machine_file(device)
    return load(path) if path.is_file() else None


def load(path: Path) -> Machine:
    """The machine that was saved there. Raises `MachineError` for no file, a broken one, or another program's."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(f"There are no measurements in {path}: {error.strerror}. Make them with meshloom calibrate.") from None
    except ValueError:
        raise MachineError(f"{path} is no JSON. Make it again with meshloom calibrate.") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise MachineError(f"{path} does not hold a machine's measurements. Make it again with meshloom calibrate.")
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
    """A round-numbered machine for examples: 1e9 FLOP/s, 1e9 bytes/s, 1 us a call; an all-reduce of two ranks at 1e9 bytes/s after 1 ms."""
    operations = [
        Operation(kind=kind, dtype="float32", backward=backward, points=((1e3, 1e-6), (1e9, 1.0))) for kind in KINDS for backward in (False, True)
    ]
    links = [Link(collective=each, ranks=2, latency_seconds=1e-3, bytes_per_second=1e9, residual=0.0) for each in COLLECTIVES]
    return Machine(
        name="example", device="cpu", model="example", devices=1, cores=2, threads=1, memory_bytes=2**30, measured_at=0.0,
        call_seconds=1e-6, backward_call_seconds=1e-6, operations=tuple(operations), links=tuple(links),
    )  # fmt: skip


def _on_curve(points: Sequence[tuple[float, float]], work: float) -> float:
    """Seconds at `work`: constant below the first point, log-linear between points, the last point's rate above it.

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


def _ring(collective: Collective, ranks: int) -> tuple[float, float]:
    """Steps of a ring and bytes that a rank sends per byte that it hands in."""
    steps = {"all_reduce": 2 * (ranks - 1), "broadcast": math.log2(ranks), "send": 1}.get(collective, ranks - 1)
    moved = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1, "broadcast": 1, "send": 1}.get(collective, (ranks - 1) / ranks)
    return steps, moved


def _machine(found: Mapping[str, Any]) -> Machine:
    plain = {key: value for key, value in found.items() if key not in ("schema", "operations", "links")}
    operations = tuple(Operation(**(each | {"points": _points(each["points"])})) for each in found["operations"])
    return Machine(**plain, operations=operations, links=tuple(Link(**each) for each in found["links"]))


def _points(found: Any) -> Any:
    return tuple((float(work), float(seconds)) for work, seconds in found)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: object) -> bool:
    return _number(value) and isinstance(value, int | float) and value > 0


def _width(dtype: str) -> str:
    """The digits of a dtype's name: those of bfloat16 and float16 are the same."""
    return "".join(letter for letter in dtype if letter.isdigit())
