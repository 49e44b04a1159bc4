"""Rows of published tables, each with its measured seconds, the predicted ones, and those of a naive baseline that knows one constant.

A table is one function of the folder of tables and of what makes a cluster of a name, and a line of TABLES. A row that cannot be
expressed says why.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_layer import Layer, Recompute, backward_flops, backward_seconds, forward_flops, forward_seconds

from meshloom.clusters.cluster import Cluster, named
from meshloom.clusters.collective_seconds import collective_seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured time.

    model: what is left out together where constants are fitted without it.
    missing: why it cannot be predicted, if so.
    fitted: constants of the cluster's file that were fitted on rows of this table.
    """

    name: str
    model: str
    cluster: str
    measured: float
    predicted: float = 0.0
    naive: float = 0.0
    missing: str = ""
    fitted: tuple[str, ...] = ()


Clusters = Callable[[str], Cluster]


def nccl_all_reduce(folder: Path, clusters: Clusters = named) -> Iterator[Row]:
    """Naive: one bus bandwidth, the median of all rows of the GPU."""
    table = "vtrain_nccl_allreduce_lut_sample.csv"
    lines = read_table(folder / table)
    for gpu, name in (("a100", "a100-80gb-sxm"), ("v100", "v100-32gb-sxm")):
        cluster = clusters(name)
        own = [line for line in lines if line["gpu"] == gpu]
        bandwidth = statistics.median(float(line["busbw_GBps"]) for line in own) * 1e9
        for line in own:
            ranks, num_bytes = int(line["n_gpus"]), int(line["size_MiB"]) * 2**20
            yield Row(
                name=f"{gpu} {ranks} GPUs {line['size_MiB']} MiB",
                model=f"{ranks} GPUs",
                cluster=cluster.name,
                measured=int(line["allreduce_time_ns"]) * 1e-9,
                predicted=collective_seconds(cluster, "all_reduce", num_bytes, range(ranks)),
                naive=2 * (ranks - 1) / ranks * num_bytes / bandwidth,
                fitted=fitted_on(cluster, f"{table}: gpu={gpu}"),
            )


LAYERS: dict[str, tuple[bool, Recompute]] = {  # whether sequence parallel, and what is recomputed
    "Baseline no recompute": (False, "none"),
    "Sequence parallelism": (True, "none"),
    "Baseline with recompute": (False, "full"),
    "Selective recompute": (False, "selective"),
    "Selective + sequence": (True, "selective"),
}


def layer_times(folder: Path, clusters: Clusters = named) -> Iterator[Row]:
    """Naive: one utilisation of the peak, the median of all rows."""
    table = "korthikanti_table4_layer_time.csv"
    cluster = clusters("a100-80gb-sxm")
    found: list[tuple[str, float, float, int]] = []  # name, measured, predicted, FLOPs
    for line in read_table(folder / table):
        sequence_parallel, recompute = LAYERS[line["experiment"]]
        layer = Layer(
            hidden=6144, heads=64, length=2048, batch=4, tp=8, sequence_parallel=sequence_parallel, recompute=recompute
        )  # fmt: skip
        forward, backward = float(line["forward_ms"]) / 1e3, float(line["backward_ms"]) / 1e3
        found += [
            (
                f"{line['experiment']}, forward",
                forward,
                forward_seconds(cluster, layer),
                forward_flops(layer),
            ),
            (
                f"{line['experiment']}, backward",
                backward,
                backward_seconds(cluster, layer),
                backward_flops(layer),
            ),
        ]
    rate = statistics.median(flops / measured for _, measured, _, flops in found)
    for name, measured, predicted, flops in found:
        yield Row(
            name=name,
            model="22B",
            cluster=cluster.name,
            measured=measured,
            predicted=predicted,
            naive=flops / rate,
            fitted=fitted_on(cluster, table),
        )


TABLES: dict[str, Callable[[Path, Clusters], Iterator[Row]]] = {
    "NCCL all-reduce": nccl_all_reduce,
    "Korthikanti table 4": layer_times,
}


def read_table(path: Path) -> list[dict[str, str]]:
    """The lines of a table whose comments begin with #."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def fitted_on(cluster: Cluster, rows: str) -> tuple[str, ...]:
    """Constants of a cluster's file that were fitted on these rows."""
    return tuple(path for path, constant in cluster.constants.items() if constant.fitted.startswith(rows))
