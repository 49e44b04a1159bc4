"""The laboratory of benchmarks/links: its hosts and what is left of them, sums over its links, its tables and
formulas."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "links"
MODULES = ("network", "ranks", "servers", "exchanges", "steps", "jobs", "traffic", "speedup", "tables")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the laboratory as its programs do; they are forgotten afterwards."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    path = list(sys.path)
    yield __import__
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def network(links: Any) -> ModuleType:
    found = links("network")
    if reason := found.why_not():
        pytest.skip(reason)
    return found


def _ring(hosts: int, median: float, name: str = "ring") -> dict[str, Any]:
    return {
        "part": "exchange",
        "algorithm": name,
        "hosts": hosts,
        "servers": 0,
        "seconds": [median],
        "median": median,
        "formula": 1.0,
    }


def test_goals_are_missed_by_one_ratio_that_is_too_large(links: Any):
    goals = links("tables").goals
    gloo = [_ring(2, 1.0, "gloo"), _ring(3, 1.0, "gloo")]
    assert "MISSED" not in goals([_ring(2, 1.03), _ring(3, 1.0), *gloo])
    assert (
        goals([_ring(2, 1.04), _ring(3, 1.0), *gloo])
        .splitlines()[1]
        .endswith("1.040 (N=2), 1.000 (N=3): MISSED")
    )
    assert goals([_ring(2, 0.84), _ring(3, 1.0)]).endswith("0.840 (N=2), 1.000 (N=3): MISSED")


def test_what_the_formulas_say_of_themselves_is_so(links: Any):
    results = [doctest.testmod(links(name)) for name in ("tables", "exchanges", "traffic", "speedup")]
    assert all(result.attempted and not result.failed for result in results), results


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_bound_is_what_a_step_takes_whose_parts_are_added_up(links: Any, n: int):
    serial, parallel, communication, bubble = 0.5, 4.0, 0.25, 1.5
    step = serial + sum(parallel / n * bubble for _ in range(n)) / n + communication
    assert links("speedup").speedup(serial + parallel, parallel, n, bubble, communication) == pytest.approx(
        (serial + parallel) / step
    )


@pytest.mark.processes
def test_sums_over_links_are_right(network: ModuleType, tmp_path: Path):
    """The ranks themselves compare their sums with those of numbers known to all."""
    words = [
        sys.executable,
        str(FOLDER / "main.py"),
        "exchange",
        "--hosts",
        "2",
        "--rounds",
        "1",
        "--servers",
        "1",
        "--bytes",
        "400000",
    ]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*words, "--json", "-"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [record["algorithm"] for record in records] == [
        "gloo",
        "ring",
        "tree",
        "halving",
        "hierarchical",
        "hosts",
        "server",
    ]
    assert all(record["links"] == "200 Mbit/s" and record["formula"] > 0 for record in records)
    assert "ring / formula" in ended.stderr


@pytest.mark.processes
def test_hosts_end_with_who_made_them_even_if_it_is_killed(network: ModuleType, tmp_path: Path):
    script = "from network import *\nwith network(2, Shape()) as hosts:\n    print([host.holder for host in hosts], flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=FOLDER
    ) as maker:
        assert maker.stdout
        holders = json.loads(maker.stdout.readline())
        own = os.readlink("/proc/self/ns/net")
        assert all(os.readlink(f"/proc/{holder}/ns/net") != own for holder in holders)
        maker.kill()
    # What is left of processes is seen by the fixture that every test has.


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("megabits", [20, 200])
def test_links_are_as_fast_as_they_were_asked_to_be(links: Any, network: ModuleType, megabits: int):
    """One message of half a second. It begins with a burst at both ends; headers are a hundredth of it, and a
    busy machine makes it slower."""
    num_bytes = megabits * 125_000 // 2
    shape = network.Shape(bits_per_second=megabits * 1e6)
    with network.network(2, shape) as hosts:
        answers = links("ranks").on_hosts(hosts, [0, 1], _message, num_bytes)
        sent, _ = hosts[0].counted()
    assert 0.5 - 2 * shape.burst_bytes / shape.bytes_per_second <= max(answers) <= 0.5 * 1.25
    assert num_bytes < sent < 1.02 * num_bytes


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_fails_ends_all_with_its_traceback(links: Any, network: ModuleType):
    with (
        network.network(2, network.Shape()) as hosts,
        pytest.raises(SystemExit, match=r"Rank 1 failed.\n(.*\n)*ZeroDivisionError"),
    ):
        links("ranks").on_hosts(hosts, [0, 1], _fail)


def _message(num_bytes: int) -> float:
    """Seconds until all of a message from rank 0 has come to rank 1 and a token has come back."""
    import time

    import torch

    from meshloom.core.mesh import Mesh
    from meshloom.launch.opening import open_world

    with open_world(Mesh(dp=2), "cpu", 60.0, "gloo") as world:
        group = world.local[0].groups["dp"]
        tensor, token = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(1)
        group.barrier().wait()
        began = time.monotonic()
        for message, source in ((tensor, 0), (token, 1)):
            (group.send(message, 1 - source) if group.rank == source else group.recv(message, source)).wait()
        return time.monotonic() - began


def _fail() -> None:
    import time

    if os.environ["RANK"] == "1":
        raise ZeroDivisionError
    time.sleep(600)
