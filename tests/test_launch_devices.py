"""The ranks' devices follow from the machine, with the reason; what is not there is an error with the way
out."""

from __future__ import annotations

import pytest
from machine import machine

from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Mesh
from meshloom.launch.devices import choose_devices, default_ranks


@pytest.mark.parametrize(
    ("ranks", "devices", "gpus", "cores", "expected"),
    [
        (4, "auto", 4, 2, "cuda: 4 ranks, one GPU each (4 GPUs are visible)"),
        (1, "auto", 1, 2, "cuda: 1 rank, one GPU each (1 GPU is visible)"),
        (4, "auto", 1, 8, "cpu: 4 ranks as processes on 8 cores, 2 threads each (1 GPU is visible)"),
        (2, "auto", 0, 2, "cpu: 2 ranks as processes on 2 cores, 1 thread each (no GPU is visible)"),
        (1, "auto", 0, 2, "cpu: 1 rank as process on 2 cores, 2 threads each (no GPU is visible)"),
        (
            4,
            "auto",
            0,
            2,
            "simulated: 4 ranks in one process on 2 cores (no GPU is visible, and 4 ranks are more than 2 cores)",
        ),
        (4, "cpu", 4, 2, "cpu: 4 ranks as processes on 2 cores, 1 thread each (asked for)"),
        (
            2,
            "auto",
            0,
            1,
            "simulated: 2 ranks in one process on 1 core (no GPU is visible, and 2 ranks are more than 1 core)",
        ),
        (4, "simulated:cuda", 1, 8, "simulated: 4 ranks in one process on 1 GPU (asked for)"),
        (2, "cuda", 2, 1, "cuda: 2 ranks, one GPU each (asked for)"),
        (2, "simulated", 2, 8, "simulated: 2 ranks in one process on 8 cores (asked for)"),
        (4, "simulated:cuda", 2, 8, "simulated: 4 ranks in one process on 2 GPUs (asked for)"),
    ],
)
def test_choice_of_devices_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, ranks: int, devices: str, gpus: int, cores: int, expected: str
):
    machine(monkeypatch, gpus, cores)
    assert choose_devices(Mesh(dp=ranks), devices) == (expected.partition(":")[0], expected)


@pytest.mark.parametrize(
    ("devices", "gpus", "message"),
    [
        (
            "cuda",
            0,
            "devices=cuda needs 4 GPUs, one for each rank, and no GPU is visible. Use devices=cpu or devices=simulated.",
        ),
        (
            "cuda",
            2,
            "and 2 GPUs are visible. Use devices=cpu or devices=simulated, or a plan of at most 2 ranks.",
        ),
        (
            "simulated:cuda",
            0,
            "devices=simulated:cuda needs a GPU, and none is visible. Use devices=simulated.",
        ),
        ("gpu", 4, "devices=gpu is not known. Use auto, cuda, cpu, simulated or simulated:cuda."),
    ],
)
def test_devices_that_are_not_there_are_an_error_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, devices: str, gpus: int, message: str
):
    machine(monkeypatch, gpus, 2)
    with pytest.raises(DeviceError) as error:
        choose_devices(Mesh(dp=4), devices)
    assert message in str(error.value)


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("3,2", 3), ("", 4), ("many", 4)])
def test_threads_that_the_user_has_set_are_kept(monkeypatch: pytest.MonkeyPatch, said: str, threads: int):
    """OpenMP takes a list too, for nested regions, and passes over what is no number: both once ended in a
    traceback."""
    machine(monkeypatch, 0, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert f"{threads} threads each" in choose_devices(Mesh(dp=2))[1]


def test_default_number_of_ranks(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, 3, 8)
    assert (default_ranks(), default_ranks("cpu"), default_ranks("cuda")) == (3, 1, 3)
    machine(monkeypatch, 0, 8)
    assert default_ranks() == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert default_ranks() == 5
