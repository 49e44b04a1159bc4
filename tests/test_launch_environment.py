"""A process knows its rank from torchrun and from srun, and a shell has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshloom.core.errors import DeviceError
from meshloom.launch.environment import cache_directory, is_rank, launched_plan, read_launched_rank

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "42",
}


def test_rank_under_torchrun_and_under_srun():
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
    }
    rank = read_launched_rank({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert rank
    assert (
        rank.rank,
        rank.size,
        rank.local_rank,
        rank.local_size,
        rank.address,
        rank.port,
        rank.hosts_store,
    ) == (5, 8, 1, 4, "head", 29500, False)
    bare = read_launched_rank({**torchrun, "RANK": "0"})
    assert bare and bare.hosts_store

    srun = {
        **SRUN,
        "MESHLOOM_SECRET": "5d1e" * 8,
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    rank = read_launched_rank(srun)
    assert rank
    assert (rank.rank, rank.size, rank.local_rank, rank.local_size, rank.address, rank.hosts_store) == (
        5,
        8,
        1,
        4,
        "gpu07",
        False,
    )
    other = read_launched_rank({**srun, "SLURM_PROCID": "0"})
    assert other and other.hosts_store and (other.address, other.port) == (rank.address, rank.port)


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}]
)
def test_a_shell_and_a_batch_script_are_no_rank(environment: dict[str, str]):
    assert read_launched_rank(environment) is None


def _slurm_port(**told: str) -> int:
    rank = read_launched_rank({**SRUN, "SLURM_STEP_NODELIST": "gpu[07-08]", **told})
    assert rank
    return rank.port


def test_the_port_under_srun_follows_from_a_secret_alone():
    """It followed from the job's number, so that anyone on rank 0's node could listen there first."""
    secret = "5d1e" * 8
    ports = {_slurm_port(MESHLOOM_SECRET=secret, SLURM_PROCID=str(rank)) for rank in range(8)}
    assert len(ports) == 1 and all(15000 <= port < 30000 for port in ports)
    assert len({_slurm_port(MESHLOOM_SECRET=f"{number:032x}") for number in range(100)}) > 90
    assert len({_slurm_port(MESHLOOM_SECRET=secret, SLURM_JOB_ID=str(job)) for job in range(100)}) > 90
    assert _slurm_port(MASTER_PORT="29500") == 29500
    with pytest.raises(DeviceError, match=r"before srun, export MESHLOOM_SECRET=\$\(openssl rand -hex 32\)"):
        _slurm_port()


def test_a_rank_that_was_told_only_half_is_a_rank(monkeypatch: pytest.MonkeyPatch):
    """The command line asks this first, outside of what reports errors; the error is for whoever needs the
    rest."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank()


def test_nothing_of_a_launch_is_in_an_ordinary_environment():
    assert launched_plan() is None
    assert not is_rank()


@pytest.mark.parametrize(
    ("said", "environment", "found"),
    [
        ("auto", {}, "/home/somebody/.cache/meshloom/readings"),
        ("auto", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/meshloom/readings"),
        ("auto", {"XDG_CACHE_HOME": "relative"}, "/home/somebody/.cache/meshloom/readings"),
        ("auto", {"MESHLOOM_CACHE": "/there", "XDG_CACHE_HOME": "/elsewhere"}, "/there"),
        ("auto", {"MESHLOOM_CACHE": "off"}, None),
        ("/mine", {"MESHLOOM_CACHE": "off"}, "/mine"),
        ("off", {"MESHLOOM_CACHE": "/there"}, None),
    ],
)
def test_readings_are_kept_where_the_user_says(
    said: str, environment: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MESHLOOM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/somebody", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache_directory(said) == (Path(found) if found else None)
