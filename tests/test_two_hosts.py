"""Ranks in two network namespaces, which count as two hosts, train as one device does; a lost rank is noticed
on both."""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshloom.comm.shm import native_engine as shm
from meshloom.machine.cores import cores
from meshloom.machine.machine import load
from tests import two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.processes]
JOB = str(Path(__file__).with_name("hosts_job.py"))
MACHINES = "through shared memory on each of 2 machines and over Gloo between them"
PAGE = Path(__file__).parents[1] / "docs" / "clusters" / "README.md"
SECONDS_TO_TELL = 10.0
SECONDS_IN_A_STEP = 2.0  # far more than one takes


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    if reason := shm.why_not():
        pytest.skip(reason)
    with two_hosts.two_hosts() as names:
        yield names


def _answers(hosts: list[str], command: list[str], places: list[int]) -> tuple[str, str]:
    """What rank 0 prints to stdout, and all ranks' errors; all end well."""
    with two_hosts.ranks_on(hosts, command, places) as processes:
        said = [process.communicate(timeout=120) for process in processes]
        errors = "\n".join(error for _, error in said)
        assert [process.returncode for process in processes] == [0] * len(places), errors
        return said[0][0], errors


@pytest.mark.parametrize(
    ("plan", "places", "transport"),
    [
        ("dp=4", [0, 0, 1, 1], f"communicating {MACHINES}"),
        ("dp=4", [0, 1, 0, 1], f"communicating {MACHINES}"),
        ("dp=4,zero=1", [0, 0, 1, 1], f"communicating {MACHINES}"),
        ("dp=3", [0, 0, 1], "communicating over Gloo (1 rank on 1 machine and 2 ranks on 1 machine)"),
        (
            "dp=2,pp=2,microbatches=2",
            [0, 0, 1, 1],
            "communicating along dp through shared memory, along pp over Gloo",
        ),
        ("pp=4,microbatches=4", [0, 0, 1, 1], f"communicating {MACHINES}"),
    ],
)
def test_a_plan_on_two_hosts_equals_one_device(
    hosts: list[str], plan: str, places: list[int], transport: str
):
    command = [
        "-m",
        "meshloom",
        "verify",
        JOB,
        "--plan",
        plan,
        "--devices",
        "cpu",
        "--steps",
        "2",
        "--dtype",
        "float64",
        "--json",
        "-",
    ]
    out, _ = _answers(hosts, command, places)
    end = json.loads(out.splitlines()[-1])
    assert end["passed"] and end["devices"].endswith(transport)


def test_each_rank_sends_its_part_of_the_bytes_between_hosts(hosts: list[str]):
    """A ring of all 4 ranks sends 2 * 3/4 of the tensor from each host; rings of 2 ranks for each half send
    once the tensor."""
    ours, gloo = (
        json.loads(_answers(hosts, ["-m", "tests.hosts_rank", transport], [0, 0, 1, 1])[0])
        for transport in ("auto", "gloo")
    )
    assert ours["well"] and gloo["well"]
    assert ours["why"].endswith(MACHINES) and gloo["why"].endswith("communicating over Gloo: asked for")
    tensor = 8 << 20
    assert tensor <= ours["bytes"] < 1.15 * tensor  # headers, and the barrier
    assert gloo["bytes"] > 1.4 * tensor


@contextmanager
def training(
    hosts: list[str], places: list[int], timeout_seconds: float = 600
) -> Generator[list[subprocess.Popen[str]]]:
    """Ranks in the middle of a training that does not end."""
    words = [
        "-m",
        "meshloom",
        "train",
        JOB,
        "--plan",
        f"dp={len(places)}",
        "--devices",
        "cpu",
        "--steps",
        "1000000",
        "--timeout",
        f"{timeout_seconds:g}",
    ]
    with two_hosts.ranks_on(hosts, [*words, "--json", "-"], places) as processes:
        first = processes[0].stdout
        assert first
        while '"event": "step"' not in first.readline():
            assert processes[0].poll() is None, processes[0].stderr and processes[0].stderr.read()
        yield processes


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_ends_all_others_on_both_hosts(hosts: list[str], victim: int):
    with training(hosts, [0, 0, 1, 1]) as processes:
        processes[victim].kill()
        killed = time.monotonic()
        for rank, process in enumerate(processes):
            if rank != victim:
                try:
                    _, errors = process.communicate(timeout=SECONDS_TO_TELL + 20)
                except subprocess.TimeoutExpired:
                    pytest.fail(f"rank {rank} goes on")
                assert process.returncode == 1
                assert "PeerLostError" in errors, errors
                if victim // 2 == rank // 2:
                    assert f"lost rank {victim} (dp={victim})" in errors, errors
        assert time.monotonic() - killed < SECONDS_TO_TELL


def test_the_page_s_lines_train_on_two_hosts(hosts: list[str], tmp_path: Path):
    lines = [
        line.split() for line in PAGE.read_text().splitlines() if line.startswith("    torchrun --nnodes 2")
    ]
    assert len(lines) == 2
    (tmp_path / "job.py").write_text("from tests.hosts_job import job\n")
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    commands = [
        [torchrun, *(two_hosts.ADDRESSES[0] if word == "first.example.com" else word for word in line[1:])]
        for line in lines
    ]
    with two_hosts.running(hosts, commands, tmp_path) as processes:
        said = [process.communicate(timeout=120) for process in processes]
        errors = "\n".join(error for _, error in said)
        assert [process.returncode for process in processes] == [0, 0], errors
    began = f"plan dp=4 on cpu: 4 ranks as processes 2 on each machine's {cores()} cores, "
    assert any(
        line.startswith(began) and line.endswith(f"communicating {MACHINES}")
        for line in said[0][0].splitlines()
    ), said[0][0]


@pytest.mark.parametrize(("places", "down"), [([0, 1], 0), ([0, 1], 1), ([0, 0, 1, 1], 1)])
def test_a_link_that_is_cut_ends_all_with_the_names_of_both_hosts(
    hosts: list[str], places: list[int], down: int
):
    with training(hosts, places, timeout_seconds=5) as processes:
        try:
            two_hosts.cut(hosts[down])
            ended = [process.communicate(timeout=5 + SECONDS_TO_TELL)[1] for process in processes]
        finally:
            two_hosts.mend(hosts[down])
    assert [process.returncode for process in processes] == [1] * len(places)
    told: set[int] = set()
    for rank, (place, errors) in enumerate(zip(places, ended, strict=True)):
        # of several ranks on a host each talks to the one of its own number on the other
        other = (rank + len(places) // 2) % len(places)
        if (
            f"rank {rank} (dp={rank}) on {hosts[place]} waited too long for rank {other} (dp={other}) on {hosts[1 - place]} in "
            in errors
        ):
            told.add(place)
        else:
            here = rf"( on {hosts[place]})?"  # with it where the group is of several hosts
            assert re.search(
                rf"rank {rank} \(dp={rank}\){here} lost rank {rank ^ 1} \(dp={rank ^ 1}\){here}, which has aborted",
                errors,
            ), errors
    assert told == {0, 1}  # the others heard it from them


def test_a_link_that_is_mended_in_time_is_waited_for(hosts: list[str]):
    with training(hosts, [0, 1], timeout_seconds=60) as processes:
        two_hosts.cut(hosts[1])
        first = processes[0].stdout
        assert first
        # what was on its way when the cable was pulled
        while select.select([first], [], [], SECONDS_IN_A_STEP)[0]:
            assert first.readline()
        two_hosts.mend(hosts[1])
        for _ in range(3):
            assert '"event": "step"' in first.readline()


def test_links_inside_a_host_and_between_hosts_are_measured_apart(hosts: list[str], tmp_path: Path):
    path = tmp_path / "machine.json"
    out, _ = _answers(
        hosts, ["-m", "meshloom", "calibrate", "--devices", "cpu", "--out", str(path)], [0, 0, 1, 1]
    )
    machine = load(path)
    assert {(link.ranks, link.place) for link in machine.links} == {
        (2, "inside"),
        (2, "between"),
        (4, "between"),
    }
    assert machine.transport == "shm+gloo" and "between hosts" in out
