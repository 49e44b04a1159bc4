"""A cluster as values: its device, the links within a host, the fabric between hosts, and its price.

host 0                         host 1
gpu -- gpu                     gpu -- gpu      links: a graph, or a switch that all are at
 |      |    rails (fabric)     |      |
 |      |  ================     |      |       rails: each rank has its share of what leaves the host
gpu -- gpu                     gpu -- gpu
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from meshloom.clusters.constants import Constant, constants_of, shipped_text
from meshloom.core.errors import MachineError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU.

    peak_flops: dense FLOP/s by dtype of the result; `tfloat32`, where there is one, is what convolutions of float32 run in.
    runtime_bytes: of memory_bytes, what the runtime itself takes: context, kernels, buffers of collectives.
    eager_launch_seconds, compiled_launch_seconds: between the starts of two operators that have nothing to do.
    memory_efficiency: share of memory_bytes_per_second that operators reach.
    product_efficiency: share of the peak in an endless product; product_half_depth: k at which half of a tile's time is not its products;
        product_least_side: of a square tile whose operands take as long to read as its products to compute.
    attention_efficiency, attention_half_keys, attention_half_head: share of the peak in endless attention, and the number of keys and the
        head size at which half of it is reached.
    convolution_efficiency: as product_efficiency.
    overlap_slowdown: how many times as long computing and sending take while both run.
    step_error: share of a step's seconds by which nine of ten published steps differ at most from what is said of them.
    """

    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    runtime_bytes: int
    multiprocessors: int
    eager_launch_seconds: float
    compiled_launch_seconds: float
    memory_efficiency: float
    product_efficiency: float
    product_half_depth: float
    product_least_side: float
    attention_efficiency: float
    attention_half_keys: float
    attention_half_head: float
    convolution_efficiency: float
    overlap_slowdown: float
    step_error: float


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """How the GPUs of a host reach each other.

    links: (gpu, gpu, how many); link_bytes_per_second: of one, in each direction.
    peer_bytes_per_second: of a GPU to those it has no link to, through switches or PCIe, in each direction.
    base_seconds: of any collective; step_seconds, hop_seconds: of a step of a ring, and from a rank of a tree to the next.
    in_switch_bytes_per_second: bytes of a tensor that the switch itself reduces in a second, for in_switch_ranks ranks and more.
    """

    gpus: int
    peer_bytes_per_second: float
    base_seconds: float
    step_seconds: float
    hop_seconds: float
    links: tuple[tuple[int, int, int], ...] = ()
    link_bytes_per_second: float = 0.0
    in_switch_bytes_per_second: float = 0.0
    in_switch_ranks: int = 0

    def __post_init__(self) -> None:
        apart = [
            link for link in self.links if not 0 <= link[0] < self.gpus > link[1] >= 0 or link[0] == link[1]
        ]
        if apart:
            raise MachineError(f"The links {apart} do not join two of {self.gpus} GPUs.")
        if (self.links and not self.link_bytes_per_second) or (
            self.in_switch_ranks and not self.in_switch_bytes_per_second
        ):
            raise MachineError(
                "Links and switches need a rate: add link_bytes_per_second or in_switch_bytes_per_second to [host]."
            )


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What joins hosts.

    rails: of a host, 0 where none were published; rail_bytes_per_second: of one, in each direction.
    efficiency: share of the rails' rate that a collective reaches; whole_host_efficiency: where all GPUs of each host take part.
    hop_seconds: from a host to the next.
    """

    efficiency: float
    whole_host_efficiency: float
    hop_seconds: float
    rails: int = 0
    rail_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.rails and not self.rail_bytes_per_second:
            raise MachineError(f"{self.rails} rails need a rate: add rail_bytes_per_second to [fabric].")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of equal devices; consecutive ranks share a host.

    constants: by path, like `device.memory_bytes`, with their sources.
    """

    name: str
    hosts: int
    device: Device
    host: HostLinks
    fabric: Fabric
    dollars_per_gpu_hour: float
    constants: Mapping[str, Constant] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.hosts, int) or self.hosts < 1:
            raise MachineError(f"hosts={self.hosts!r} is no number of hosts. Give 1 or more.")
        if self.hosts > 1 and not self.fabric.rails:
            raise MachineError(
                f"{self.name} has no fabric of its own to join {self.hosts} hosts. Give one, like fabric=8x400."
            )

    @property
    def gpus_per_host(self) -> int:
        return self.host.gpus

    @property
    def gpus(self) -> int:
        return self.hosts * self.host.gpus


Part = TypeVar("Part", Device, HostLinks, Fabric)


def named(name: str, hosts: int = 1, fabric: str | None = None) -> Cluster:
    """Return the shipped cluster `name`. fabric: RAILSxGIGABITS of a host, like "8x400"; None: the file's own. Raises `MachineError`.

    >>> named("h100-80gb-sxm", hosts=8, fabric="8x400").fabric.rail_bytes_per_second
    50000000000.0
    """
    return _cluster(name, constants_of(shipped_text(name), name), hosts, fabric)


def load(path: str | Path, hosts: int = 1, fabric: str | None = None) -> Cluster:
    """Return the cluster of a file, which may inherit one that lies beside it or is shipped. Raises `MachineError`."""
    path = Path(path)
    if not path.is_file():
        raise MachineError(f"There is no cluster file {path}.")
    return _cluster(
        path.stem, constants_of(path.read_text(encoding="utf-8"), path.stem, path.parent), hosts, fabric
    )


def changed(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return the cluster with other values of some constants, by path. Raises `MachineError`.

    >>> changed(named("h200-sxm"), {"device.product_efficiency": 0.5}).device.product_efficiency
    0.5
    """
    unknown = sorted(values.keys() - cluster.constants.keys())
    if unknown:
        raise MachineError(
            f"{cluster.name} has no constant {', '.join(unknown)}. It has {', '.join(cluster.constants)}."
        )
    constants = {
        path: replace(constant, value=values.get(path, constant.value))
        for path, constant in cluster.constants.items()
    }
    other = _cluster(cluster.name, constants, 1, None)
    rails, rate = cluster.fabric.rails, cluster.fabric.rail_bytes_per_second
    fabric = replace(other.fabric, rails=rails, rail_bytes_per_second=rate)
    return replace(other, hosts=cluster.hosts, fabric=fabric)


def _cluster(name: str, constants: Mapping[str, Constant], hosts: int, fabric: str | None) -> Cluster:
    tables: dict[str, dict[str, Any]] = {
        section: {} for section in ("device", "device.peak_flops", "host", "fabric", "price")
    }
    for path, constant in constants.items():
        section, _, key = path.rpartition(".")
        if section not in tables:
            raise MachineError(
                f"{path} of {name} is no constant of a cluster. Its sections are {', '.join(tables)}."
            )
        tables[section][key] = _checked(path, constant.value, name)
    tables["device"]["peak_flops"] = tables.pop("device.peak_flops")
    wire = _part(Fabric, tables["fabric"], f"fabric of {name}")
    return Cluster(
        name=name,
        hosts=hosts,
        device=_part(Device, tables["device"], f"device of {name}"),
        host=_part(HostLinks, tables["host"], f"host of {name}"),
        fabric=wire if fabric is None else _with_rails(wire, fabric),
        dollars_per_gpu_hour=_price(tables["price"], name),
        constants=constants,
    )


def _checked(path: str, value: Any, name: str) -> Any:
    if path == "host.links":
        return _links(value, name)
    whole = path in ("host.gpus", "host.in_switch_ranks", "fabric.rails", "device.multiprocessors")
    least = 0 if path == "fabric.rails" else 1 if whole else math.ulp(0)
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not least <= value < math.inf
    ):
        raise MachineError(
            f"{path} of {name} is {value!r}, and must be a {'whole ' if whole else ''}number above 0."
        )
    if path.endswith("efficiency") and value > 1:
        raise MachineError(f"{path} of {name} is {value}, and a share is at most 1.")
    return value


def _links(value: Any, name: str) -> tuple[tuple[int, int, int], ...]:
    try:
        return tuple((int(one), int(other), int(count)) for one, other, count in value)
    except (TypeError, ValueError) as error:
        raise MachineError(
            f"host.links of {name} is {value!r}. Write [[GPU, GPU, HOW MANY], ...]."
        ) from error


def _part(part: type[Part], values: dict[str, Any], where: str) -> Part:
    names = {each.name: each.default is MISSING for each in fields(part)}
    unknown = sorted(values.keys() - names.keys())
    missing = sorted(name for name, required in names.items() if required and name not in values)
    if unknown or missing:
        wrong = f"has {', '.join(unknown)}, which is not known" if unknown else f"lacks {', '.join(missing)}"
        raise MachineError(f"The {where} {wrong}. Its constants are {', '.join(names)}.")
    return part(**values)


def _price(values: dict[str, Any], name: str) -> float:
    if values.keys() != {"dollars_per_gpu_hour"}:
        raise MachineError(
            f"The price of {name} must be dollars_per_gpu_hour alone, and has {', '.join(values) or 'nothing'}."
        )
    return values["dollars_per_gpu_hour"]


def _with_rails(fabric: Fabric, text: str) -> Fabric:
    """8x400: eight rails of 400 Gb/s a host."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise MachineError(
            f"fabric={text} is not RAILSxGIGABITS of a host. Write 8x400 for eight rails of 400 Gb/s."
        )
    rails, gigabits = map(int, match.groups())
    return replace(fabric, rails=rails, rail_bytes_per_second=gigabits * 1e9 / 8)
