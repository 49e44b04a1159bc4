"""A process knows its rank from torchrun and from srun, and a shell has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshloom.cli.main import main
from meshloom.core.errors import DeviceError
from meshloom.launch.child_environment import rank_environment, reference_environment
from meshloom.launch.environment import (
    cache_directory,
    is_rank,
    launched_plan,
    launched_rank,
    ranks_aside,
    read_launched_rank,
)

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


_NO_RANKS = "", "abc", "2", "-1", "0.5", " 0 ", "\N{ARABIC-INDIC DIGIT ZERO}"
TWO = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(({"RANK": each}, rf"RANK='{each}' .* a whole number, 0 to 1, as WORLD_SIZE=2\.") for each in _NO_RANKS),
        ({"RANK": "1" * 5000}, "RANK=.* a whole number"),
        *(({"WORLD_SIZE": each}, f"WORLD_SIZE='{each}' .* a whole number, 1 or more") for each in ("", "two", "0")),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' .* as LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "5"}, "LOCAL_RANK='5' .* as LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK='5' .* as WORLD_SIZE=2"),
        *(({"MASTER_PORT": each}, f"MASTER_PORT='{each}' .* 1 to 65535") for each in ("abc", "99999", "0")),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not"),
        ({"RANK": None}, "WORLD_SIZE=2 is set and RANK is not"),
        ({"WORLD_SIZE": None}, "RANK=0 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": None, "SLURM_PROCID": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
    ],
)  # fmt: skip
@pytest.mark.every
def test_variables_of_a_rank_that_make_no_sense_are_one_sentence(
    change: dict[str, str | None], sentence: str
):
    """Each of these processes trained the whole job, or waited for others until the timeout."""
    environment = {name: value for name, value in {**TWO, **change}.items() if value is not None}
    with pytest.raises(DeviceError, match=sentence) as raised:
        read_launched_rank(environment)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(("name", "value"), [("SLURM_PROCID", "8"), ("SLURM_PROCID", "a"), ("SLURM_STEP_NUM_TASKS", "many"), ("SLURM_LOCALID", "-1")])  # fmt: skip
def test_slurm_s_variables_are_named_too(name: str, value: str):
    with pytest.raises(DeviceError, match=f"{name}='{value}' .* a whole number"):
        read_launched_rank({**SRUN, "MASTER_PORT": "1", name: value})


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "1"}, {"MASTER_ADDR": "head", "MASTER_PORT": "x"}, {"LOCAL_RANK": "0"}])  # fmt: skip
def test_what_containers_set_for_one_process_is_no_rank(environment: dict[str, str]):
    assert read_launched_rank(environment) is None


def test_a_command_says_so_before_it_loads_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "job.py"
    file.write_text("raise SystemExit('loaded')")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(file), "--plan", "dp=2", "--devices", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("DeviceError: WORLD_SIZE=2 is set and RANK is not")


def test_a_job_finds_no_variables_of_ranks(monkeypatch: pytest.MonkeyPatch):
    """A dataset that split itself by them read 52 of 64 samples, some twice."""
    told = {
        **TWO, **SRUN, "TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0", "ROLE_WORLD_SIZE": "2", "NODE_RANK": "0", "SLURM_NTASKS": "2", "PMI_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }  # fmt: skip
    others = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "RANKING": "best"}
    for name, value in {**told, **others}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    for _ in range(2):
        with ranks_aside():
            seen = {name for name in told if name not in others and name in os.environ}
            assert not seen and all(name in os.environ for name in others)
            assert is_rank() and launched_rank() == read_launched_rank(before)
            with ranks_aside():
                assert is_rank() and launched_rank() == read_launched_rank(before)
            started = rank_environment(1, 3, 5, "", "cpu", "dp=3")
            there = read_launched_rank(started)
            assert there and (there.rank, there.size) == (1, 3)
            assert not any(
                name in reference_environment(9)
                for name in (*told, "MESHLOOM_LAUNCHED")
                if name not in others
            )
            with monkeypatch.context() as patch:
                patch.setattr(os, "environ", started)
                assert launched_rank() == there
        assert dict(os.environ) == before


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
