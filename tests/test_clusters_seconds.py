"""Seconds of collectives and operators on a cluster that is not here: against published measurements, and against what cannot be otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.planner.fit import fitted, mean_error
from benchmarks.planner.main import score
from benchmarks.planner.measured_tables import Row, layer_times, nccl_all_reduce
from meshloom.clusters.cluster import Cluster, changed, named
from meshloom.clusters.collective_seconds import collective_seconds, overlapped_seconds
from meshloom.clusters.constants import shipped_names
from meshloom.clusters.operator_seconds import operator_seconds
from meshloom.clusters.rings import num_rings, num_trees
from meshloom.clusters.work import Collective, OperatorWork
from meshloom.core.errors import MachineError

PUBLISHED = Path(__file__).parents[1] / "benchmarks" / "planner" / "tables"
SIZES = [2**power for power in range(0, 36, 3)]
MESH = named("v100-32gb-sxm").host.links
GROUPS = {
    "pair": range(2), "half": range(4), "five": range(5), "host": range(8), "two hosts": range(16), "one a host": range(0, 64, 8),
    "two a host": [0, 1, 8, 9, 16, 17], "uneven": range(12), "eight hosts": range(64),
}  # fmt: skip


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16", times: int = 1) -> OperatorWork:
    num_bytes = 2 * batch * (m * k + k * n + m * n)
    return OperatorWork(
        kind="product",
        flops=2 * batch * m * n * k,
        num_bytes=num_bytes,
        dtype=dtype,
        sizes=(batch, m, n, k),
        times=times,
    )


def moved(num_bytes: int) -> OperatorWork:
    return OperatorWork(kind="other", flops=0, num_bytes=num_bytes, dtype="bfloat16")


def attention(heads: int, queries: int, keys: int, head: int) -> OperatorWork:
    flops = 4 * heads * queries * keys * head
    return OperatorWork(
        kind="attention", flops=flops, num_bytes=1, dtype="bfloat16", sizes=(heads, queries, keys, head)
    )


# -- against published measurements


def test_nccl_on_a100_and_v100():
    """V100's eight bandwidths are those of its link graph, with one rate for all links."""
    rows = list(nccl_all_reduce(PUBLISHED))
    assert len(rows) == 2 * 7 * 11
    for cluster in ("a100-80gb-sxm", "v100-32gb-sxm"):
        scores = score([row for row in rows if row.cluster == cluster])
        assert scores["mean_percent"] <= 7 and scores["rank_correlation"] > 0.99, scores
        assert scores["naive_mean_percent"] > 4 * scores["mean_percent"]
    for row in rows:
        if row.cluster == "v100-32gb-sxm" and row.name.endswith("1024 MiB"):
            assert row.predicted == pytest.approx(row.measured, rel=0.07), row.name


def test_a_layer_of_korthikanti():
    rows = list(layer_times(PUBLISHED))
    scores = score(rows)
    assert len(rows) == 10 and scores["mean_percent"] <= 3 and scores["rank_correlation"] > 0.99, scores
    assert all(row.fitted == ("device.product_efficiency",) for row in rows)


def test_hosts_of_published_sweeps():
    """4 GiB over four hosts of eight: 22.05 ms on B200, and 365 GB/s of bus bandwidth on H200 (Bekman, Machine Learning Engineering)."""
    b200, h200 = named("b200-sxm", hosts=4), named("h200-sxm", hosts=4)
    assert collective_seconds(b200, "all_reduce", 2**32, range(32)) == pytest.approx(22.05e-3, rel=0.05)
    assert 2 * 31 / 32 * 2**32 / collective_seconds(h200, "all_reduce", 2**32, range(32)) == pytest.approx(
        365e9, rel=0.05
    )


def test_a_missing_row_is_counted_and_not_scored():
    rows = [
        Row(name="a", model="m", cluster="c", measured=1.0, predicted=1.1, naive=2.0),
        Row(name="b", model="m", cluster="c", measured=2.0, predicted=1.8, naive=3.0),
        Row(name="c", model="m", cluster="c", measured=1.0, missing="float8"),
    ]
    scores = score(rows)
    assert (scores["rows"], scores["missing"]) == (3, 1)
    assert (scores["mean_percent"], scores["signed_percent"], scores["naive_mean_percent"]) == (
        10.0,
        0.0,
        75.0,
    )


def test_a_fit_finds_the_constants_that_made_the_rows():
    cluster, paths = named("a100-80gb-sxm"), ("host.base_seconds", "host.peer_bytes_per_second")
    truth = changed(cluster, dict(zip(paths, (2e-5, 1.5e11), strict=True)))

    def rows_of(values: Sequence[float]) -> list[Row]:
        guess = changed(cluster, dict(zip(paths, values, strict=True)))
        return [
            Row(
                name="", model=str(ranks), cluster=cluster.name,
                measured=collective_seconds(truth, "all_reduce", size, range(ranks)) * (1 if ranks < 8 else 5),
                predicted=collective_seconds(guess, "all_reduce", size, range(ranks)),
            )
            for ranks in (2, 5, 8) for size in SIZES
        ]  # fmt: skip

    found = fitted(rows_of, [cluster.constants[path].value for path in paths], without=("8",))
    assert found == pytest.approx([2e-5, 1.5e11], rel=0.01)  # the search ends near them
    assert mean_error(rows_of(found)) == pytest.approx(
        0.8 / 3, rel=0.01
    )  # of a third of the rows four fifths


# -- rings and trees


@pytest.mark.parametrize(
    ("gpus", "rings", "trees"), [(2, 1, 1), (3, 2, 2), (4, 4, 3), (5, 0, 2), (6, 2, 2), (7, 4, 3), (8, 6, 3)]
)
def test_rings_of_the_cube_mesh(gpus: int, rings: int, trees: int):
    """The measured bandwidths are these times 22.5 GB/s; five GPUs have no ring, and use trees."""
    assert (num_rings(MESH, tuple(range(gpus))), num_trees(MESH, tuple(range(gpus)))) == (rings, trees)


def test_rings_and_trees_of_a_clique():
    """K5 is two cycles (Walecki), four rings with both directions, and two trees; K4 one cycle and two trees."""
    for gpus, rings, trees in ((4, 2, 2), (5, 4, 2)):
        clique = tuple((one, other, 1) for one, other in itertools.combinations(range(gpus), 2))
        assert (num_rings(clique, tuple(range(gpus))), num_trees(clique, tuple(range(gpus)))) == (
            rings,
            trees,
        )


def test_gpus_that_are_not_linked_take_pcie():
    v100 = named("v100-32gb-sxm")
    linked, apart = (collective_seconds(v100, "send", 2**30, pair) for pair in ([0, 3], [0, 5]))
    assert apart / linked == pytest.approx(
        2 * v100.host.link_bytes_per_second / v100.host.peer_bytes_per_second, rel=1e-3
    )
    pcie = named("a100-40gb-pcie")
    paired, crossing = (collective_seconds(pcie, "all_reduce", 2**30, pair) for pair in ([0, 1], [1, 2]))
    assert crossing > 8 * paired


# -- collectives


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("group", GROUPS)
def test_more_bytes_take_longer(name: str, group: str):
    cluster = named(name, hosts=8, fabric="8x200")
    for collective in get_args(Collective):
        ranks = list(GROUPS[group])[:: -1 if collective != "send" else len(GROUPS[group]) - 1]
        seconds = [collective_seconds(cluster, collective, size, ranks) for size in SIZES]
        assert all(low < high for low, high in itertools.pairwise(seconds)), (collective, seconds)
        assert collective_seconds(cluster, collective, 0, ranks) == 0
        assert collective_seconds(cluster, collective, 2**20, [3]) == 0


@pytest.mark.parametrize("group", ["pair", "host", "two hosts", "one a host", "eight hosts"])
def test_an_all_reduce_is_at_most_its_two_halves(group: str):
    cluster, ranks = named("a100-80gb-sxm", hosts=8), GROUPS[group]
    for size in SIZES:
        halves = sum(
            collective_seconds(cluster, half, size, ranks) for half in ("reduce_scatter", "all_gather")
        )
        assert collective_seconds(cluster, "all_reduce", size, ranks) <= halves * (1 + 1e-9)


def bus_bandwidth(cluster: Cluster, ranks: Sequence[int]) -> float:
    size = 2**36
    return 2 * (len(ranks) - 1) / len(ranks) * size / collective_seconds(cluster, "all_reduce", size, ranks)


def test_rails_are_shared():
    """A rank of a host has an eighth of its rails, all of them have all; no more than the links within the host carry."""
    cluster = named("a100-80gb-sxm", hosts=8)
    alone, together = bus_bandwidth(cluster, range(0, 64, 8)), bus_bandwidth(cluster, range(64))
    assert alone == pytest.approx(25e9 * cluster.fabric.efficiency, rel=0.01)
    assert together == pytest.approx(8 * 25e9 * cluster.fabric.whole_host_efficiency, rel=0.01)
    wide = named("a100-80gb-sxm", hosts=8, fabric="8x800")
    assert bus_bandwidth(wide, range(64)) == pytest.approx(cluster.host.peer_bytes_per_second, rel=0.01)


def test_few_bytes_over_many_hosts_take_no_ring():
    """A ring of 512 ranks would take 1,022 steps, 126 of them between hosts; there and back through 64 hosts are 12 hops of a tree."""
    cluster = named("a100-80gb-sxm", hosts=64)
    seconds = collective_seconds(cluster, "all_reduce", 1024, range(512))
    ring = 2 * (448 * cluster.host.step_seconds + 63 * cluster.fabric.hop_seconds)
    assert 12 * cluster.fabric.hop_seconds < seconds < ring / 3


def test_a_switch_adds_for_enough_ranks():
    h200 = named("h200-sxm")
    assert bus_bandwidth(h200, range(4)) == pytest.approx(366e9, rel=0.01)  # measured: 363
    assert bus_bandwidth(h200, range(8)) == pytest.approx(473e9, rel=0.01)  # measured: 473
    gathered = 7 / 8 * 2**36 / collective_seconds(h200, "all_gather", 2**36, range(8))
    assert gathered == pytest.approx(366e9, rel=0.01)  # measured: 361


def test_ranks_are_in_the_cluster():
    with pytest.raises(MachineError, match="Rank 8 is none of 8 GPUs of h200-sxm. Give more hosts than 1."):
        collective_seconds(named("h200-sxm"), "all_reduce", 1, range(9))


def test_what_overlaps_is_between_the_longer_and_the_sum():
    device = named("h200-sxm").device
    for computing, sending in ((3.0, 1.0), (1.0, 3.0), (2.0, 2.0)):
        assert max(computing, sending) < overlapped_seconds(device, computing, sending) < computing + sending
    assert overlapped_seconds(device, 5.0, 0.0) == 5.0


# -- operators


@pytest.mark.parametrize("name", shipped_names())
def test_operators_never_beat_the_device(name: str):
    device = named(name).device
    for m, n, k in itertools.product((8, 96, 1000, 8192), repeat=3):
        for dtype in ("bfloat16", "float32"):
            work = product(m, n, k, dtype=dtype)
            seconds = operator_seconds(device, work)
            assert work.flops / seconds < device.peak_flops[dtype] * device.product_efficiency
            assert work.num_bytes / seconds < device.memory_bytes_per_second
            assert seconds >= device.eager_launch_seconds


def test_small_operators_take_a_launch():
    device = named("h200-sxm").device
    assert operator_seconds(device, moved(100)) == device.eager_launch_seconds
    assert operator_seconds(device, moved(100), compiled=True) == device.compiled_launch_seconds
    assert operator_seconds(device, replace(moved(100), times=7)) == 7 * device.eager_launch_seconds


def test_products_approach_their_efficiency_with_size():
    device = named("a100-80gb-sxm").device
    shares = [
        work.flops / operator_seconds(device, work) / (312e12 * device.product_efficiency)
        for work in (product(size, size, size) for size in (256, 1024, 4096, 16384))
    ]
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] > 0.95
    deep, shallow = product(4096, 4096, 4096), product(4096, 4096, 64, batch=64)
    assert deep.flops == shallow.flops and operator_seconds(device, shallow) > 1.5 * operator_seconds(
        device, deep
    )


def test_a_wave_more_of_tiles_takes_a_wave_longer():
    """108 multiprocessors: twelve times nine tiles of 256 x 128 are one wave, and a row more of tiles does not fit."""
    device = replace(named("a100-80gb-sxm").device, eager_launch_seconds=1e-12)
    one, more = product(256 * 9, 128 * 12, 8192), product(256 * 9, 128 * 12 + 1, 8192)
    assert operator_seconds(device, more) > 1.2 * operator_seconds(device, one)


def test_few_tiles_split_their_depth():
    """The weights' gradient of a narrow layer: one tile that 32,768 tokens are summed into."""
    device = named("a100-80gb-sxm").device
    work = product(128, 128, 32768)
    of_one_tile = work.flops / (312e12 * device.product_efficiency / device.multiprocessors)
    assert operator_seconds(device, work) < of_one_tile / 3


def test_attention_of_short_sequences_and_small_heads_is_slower():
    device = named("h100-80gb-sxm").device

    def rate(*sizes: int) -> float:
        work = attention(*sizes)
        return work.flops / operator_seconds(device, work)

    assert rate(1024, 512, 512, 128) < rate(1024, 8192, 8192, 128)
    assert rate(1024, 4096, 4096, 64) < rate(1024, 4096, 4096, 128)
    assert rate(1, 128, 8192, 128) < rate(1024, 128, 8192, 128) / 50  # one block on 132 multiprocessors
    assert rate(1024, 16384, 16384, 128) == pytest.approx(
        370e12, rel=0.02
    )  # measured of FlashAttention-2: 370


def test_convolutions_of_float32_round_to_tfloat32():
    device = named("a100-80gb-sxm").device
    work = product(2**16, 1024, 4096, dtype="float32")
    convolution = replace(work, kind="convolution", sizes=work.sizes[1:])
    assert operator_seconds(device, convolution) < operator_seconds(device, work) / 4
    half = replace(convolution, dtype="float16")
    assert operator_seconds(device, half) == pytest.approx(
        operator_seconds(device, convolution) / 2, rel=0.01
    )


def test_a_dtype_without_a_peak():
    with pytest.raises(
        MachineError, match="The device has no peak for int8. It has one for float16, bfloat16"
    ):
        operator_seconds(named("h200-sxm").device, product(8, 8, 8, dtype="int8"))
