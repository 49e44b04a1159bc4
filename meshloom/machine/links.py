"""How fast ranks communicate: measured lines.

seconds of a collective
    |             .  bytes / rate
    |        .
    |.  latency
    +--------------- bytes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeGuard, get_args

from meshloom.core.errors import MachineError

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "send"
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Where = Literal["inside", "between"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Seconds of a collective of `ranks` ranks: latency_seconds + bytes / bytes_per_second, as fitted.

    Bytes are those of the tensor that one rank hands in. residual: largest relative error of the fit.
    among: ranks that ran on the devices at that time, in groups of `ranks`; 0: only these.
    place: inside one host, or between hosts. in_place: tensors lay in memory that all ranks can read.
    algorithm: `ring`: the all-reduce on messages; "": the transport's own collective. Others, of older files, are not used.
    points: (bytes, seconds), bytes ascending, as measured; if any, predictions interpolate between them.
    """

    collective: Collective
    ranks: int
    latency_seconds: float
    bytes_per_second: float
    residual: float
    among: int = 0
    place: Where = "inside"
    in_place: bool = False
    algorithm: str = ""
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise MachineError(
                f"A link of {self.collective!r} is not known. Collectives are {', '.join(COLLECTIVES)}."
            )
        if not isinstance(self.ranks, int) or self.ranks < 2:
            raise MachineError(
                f"{self.collective} among {self.ranks!r} ranks is no link. Give 2 ranks or more."
            )
        negative = not _is_number(self.latency_seconds) or self.latency_seconds < 0
        if negative or not is_positive(self.bytes_per_second):
            raise MachineError(
                f"{self.collective} among {self.ranks} ranks takes {self.latency_seconds!r} s and {self.bytes_per_second!r} bytes/s, "
                "which are no latency and no rate. Calibrate again."
            )
        if self.place not in get_args(Where):
            raise MachineError(
                f"A link {self.place!r} hosts is not known. Links are {' or '.join(get_args(Where))} hosts."
            )
        steps = pairwise([*self.points, (math.inf, 1.0)])
        if not all(is_positive(seconds) and low < high for (low, seconds), (high, _) in steps):
            raise MachineError(
                f"The points of {self.collective} must be (bytes, seconds) above 0 with ascending bytes, and are {self.points}."
            )

    def seconds(self, num_bytes: float) -> float:
        """The seconds for `num_bytes`: between measured points, then at the last rate; else from the line."""
        if not self.points:
            return self.latency_seconds + num_bytes / self.bytes_per_second
        (low, low_seconds), *rest = self.points
        if num_bytes <= low or not rest:
            return low_seconds
        for high, high_seconds in rest:
            if num_bytes <= high:
                return low_seconds + (high_seconds - low_seconds) * (num_bytes - low) / (high - low)
            low, low_seconds = high, high_seconds
        return low_seconds + (num_bytes - low) / self.bytes_per_second


def links_of(found: Iterable[Mapping[str, Any]]) -> tuple[Link, ...]:
    """From JSON values, the fields of each. Raises `MachineError`, or the error of a missing or mistyped field, if one is wrong."""
    return tuple(Link(**{**each, "points": points_of(each.get("points", ()))}) for each in found)


def seconds_of(
    links: Iterable[Link],
    collective: Collective,
    num_bytes: float,
    ranks: int,
    *,
    among: int | None = None,
    place: Where | None = None,
    in_place: bool = False,
) -> float | None:
    """Seconds of the transport's own collective, each rank handing in `num_bytes`; None if it was never
    measured.

    The most similar measurement is used: place and whether tensors lie in place count first, then the ranks
    of the group, then those on the devices (among; default: any). For a number of ranks that was not
    measured, latency and bytes are scaled by the steps of a ring and the bytes it sends: an all-reduce takes
    2(N-1) steps and sends 2(N-1)/N of the bytes (Patarasuk & Yuan, 2009).

    >>> links = [Link(collective="all_reduce", ranks=2, latency_seconds=1e-3, bytes_per_second=1e9, residual=0.0)]
    >>> seconds_of(links, "all_reduce", 1e9, 2), seconds_of(links, "all_reduce", 1e9, 4)
    (1.001, 1.503)
    """
    if ranks == 1:
        return 0.0

    def distance(link: Link) -> tuple[bool, bool, float, float]:
        of_group = abs(math.log(link.ranks / ranks))
        of_devices = abs(math.log((link.among or link.ranks) / among)) if among else 0.0
        return link.place != (place or link.place), link.in_place != in_place, of_group, of_devices

    own = (each for each in links if each.collective == collective and not each.algorithm)
    link = min(own, key=distance, default=None)
    if link is None:
        return None
    if link.ranks == ranks:
        return link.seconds(num_bytes)
    steps, moved = ring(collective, ranks)
    measured_steps, measured_moved = ring(collective, link.ranks)
    latency = link.latency_seconds * steps / measured_steps
    return latency + num_bytes / link.bytes_per_second * moved / measured_moved


def ring(collective: Collective, ranks: int) -> tuple[float, float]:
    """Steps of a ring, and bytes that a rank sends per byte that it hands in. A gather ends on one rank,
    which receives from all others."""
    others = ranks - 1
    steps = {"all_reduce": 2 * others, "broadcast": math.log2(ranks), "send": 1}
    moved = {
        "all_reduce": 2 * others / ranks,
        "all_gather": others,
        "gather": others,
        "broadcast": 1,
        "send": 1,
    }
    return steps.get(collective, others), moved.get(collective, others / ranks)


def fit_link(
    collective: Collective,
    ranks: int,
    measured: Sequence[tuple[float, float]],
    *,
    among: int = 0,
    place: Where = "inside",
    in_place: bool = False,
    keep_points: bool = False,
) -> Link:
    """The line through (bytes, seconds) with the least relative squared error.

    >>> link = fit_link("send", 2, [(1e3, 0.002), (1e6, 1.001)])
    >>> link.latency_seconds, link.bytes_per_second, link.residual
    (0.001, 1000000.0, 0.0)
    """
    # Minimise sum(((a + b x) / y - 1)^2): the normal equations with u = 1/y and v = x/y. Sizes differ by
    # thousands, so errors are relative.
    pairs = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in measured]
    uu, uv, vv = (sum(one[i] * one[j] for one in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = sum(one[0] for one in pairs), sum(one[1] for one in pairs)
    determinant = uu * vv - uv * uv
    latency, per_byte = 0.0, v / vv
    if determinant > 1e-12 * uu * vv:
        latency, per_byte = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
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
        among=among,
        place=place,
        in_place=in_place,
        points=points_of(measured) if keep_points else (),
    )


def points_of(found: Iterable[tuple[Any, Any]]) -> Any:
    """Points of a curve from JSON: ((work or bytes, seconds), ...)."""
    return tuple((float(work), float(seconds)) for work, seconds in found)


def is_positive(value: object) -> bool:
    """Whether a value of a file is a finite number above 0."""
    return _is_number(value) and value > 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
