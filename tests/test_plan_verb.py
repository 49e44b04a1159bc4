"""`meshloom plan` as a user meets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsals import machine
from test_cli import FILE, records

from meshloom.cli.main import main
from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import DeviceError, MachineError, PlanError
from meshloom.core.plan import Plan
from meshloom.machine.links import COLLECTIVES, Link
from meshloom.machine.machine import DISK_RATE, machine_file, save
from meshloom.measure.at_hand import Wish, devices_for
from meshloom.planner import advise
from meshloom.planner.candidates import candidates
from meshloom.planner.measure import disk_rate
from meshloom.planner.pricing import Devices

pytestmark = pytest.mark.usefixtures("own_path")

HERE = "gloo" if why_not() else "shm"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are rehearsed on CPUs; where there are GPUs, `--devices cpu` has to be said."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which this machine was measured; its file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = machine_file("cpu")
    save(machine(transport=HERE, name=path.name.removesuffix("-cpu.json")), path)
    return path


@pytest.mark.slow
def test_all_plans_are_priced_and_one_is_recommended(measured: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", FILE, "--ranks", "2", "--json", "-"]) == 0
    captured = capsys.readouterr()
    found = records(captured.out)
    events = [each["event"] for each in found]
    assert events[0] == "one_device" and events[-1] == "recommended"
    plans = {each["plan"] for each in found if each["event"] == "plan"}
    assert {"dp=1", "dp=2", "dp=1,tp=2"} <= plans
    assert found[-1]["plan"] in plans
    assert found[-1]["why"] in captured.err


@pytest.mark.long
def test_one_plan_is_priced_by_itself(measured: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", FILE, "--plan", "dp=3", "--devices", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan ")
    assert "dp=3: each of 3 replicas trains on a third of the batch" in text
    assert "Amdahl" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("without_job_files")
def test_a_second_start_captures_nothing(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every plan that was priced used to capture the loss anew, and every start all of them."""
    exports: list[object] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        exports.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)

    def start() -> int:
        exports.clear()
        words = ["plan", FILE, "--plan", "tp=2", "--cache", str(tmp_path / "cache"), "--json", "-"]
        assert main(words) == 0
        assert records(capsys.readouterr().out)[-1]["plan"] == "dp=1,tp=2"
        return len(exports)

    assert start() > 0
    assert start() == 0


@pytest.mark.long
def test_what_does_not_fit_is_said_and_1(measured: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", FILE, "--plan", "dp=1", "--memory", "1KiB"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text and "No plan on these devices fits" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "0 ranks can run no plan"),
        (["--devices", "cuda"], "--devices cuda cannot be priced"),
        (["--devices", "2", "--ranks", "3"], "both say how many ranks"),
        (["--try", "0"], "--try 0 must be 1 or more"),
        (
            ["--try", "2", "--machine", "other.json"],
            "--try trains on this machine, and --machine other.json prices plans for another",
        ),
        (["--memory", "much"], "much is no number of bytes"),
        (["--plan", "dp=2,exchange=async"], "has no steps that all workers take together"),
        (["--machine", "/nowhere/machine.json"], "There are no measurements in /nowhere/machine.json"),
        (["--transport", "gloo", "--plan", "dp=2"], "Run meshloom calibrate --transport gloo"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_2(
    measured: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    if HERE == "gloo" and "--transport" in words:
        pytest.skip("here ranks talk over Gloo anyway")
    assert main(["plan", FILE, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_what_cannot_be_priced_is_said_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["plan", FILE, "--plan", "dp=2,exchange=async"]) == 2
    text = capsys.readouterr().err
    assert "has no steps that all workers take together" in text and "measured" not in text


def test_measurements_over_another_transport_are_not_used(measured: Path):
    save(machine(transport="gloo" if HERE == "shm" else "shm"), measured)
    with pytest.raises(MachineError, match="were measured over .*, and ranks here talk over"):
        devices_for(Wish(ranks=2), 1, print)


def test_a_machine_calibrated_with_one_rank_says_so(measured: Path):
    save(machine(links=(), transport=""), measured)
    with pytest.raises(MachineError, match="Run meshloom calibrate --ranks 2"):
        devices_for(Wish(ranks=2), 1, print)


def test_another_machine_needs_this_one_measured(measured: Path, tmp_path: Path):
    other = tmp_path / "other.json"
    save(replace(machine(transport=HERE), name="elsewhere"), other)
    found = devices_for(Wish(ranks=2, machine=other), 1, print)
    assert not isinstance(found, int) and found.machine.name == "elsewhere" and found.here is not None
    measured.unlink()
    with pytest.raises(MachineError, match="this one was not measured. Run meshloom calibrate first"):
        devices_for(Wish(ranks=2, machine=other), 1, print)


def test_measurements_of_gpus_are_refused(measured: Path, tmp_path: Path):
    other = tmp_path / "gpus.json"
    save(machine(transport="nccl", device="cuda"), other)
    with pytest.raises(MachineError, match="is of cuda, and plans are rehearsed on CPUs"):
        devices_for(Wish(ranks=2, machine=other), 1, print)


def test_where_gpus_are_cpus_are_asked_for(measured: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(DeviceError, match="here are GPUs, .* Use --devices cpu"):
        devices_for(Wish(ranks=2), 1, print)
    assert isinstance(devices_for(Wish(ranks=2, devices="cpu"), 1, print), Devices)


def test_a_wish_that_cannot_be_is_refused():
    with pytest.raises(DeviceError, match="cannot be priced"):
        Wish(devices="simulated")
    with pytest.raises(PlanError, match="can run no plan"):
        Wish(devices="0")


@pytest.mark.slow
@pytest.mark.processes
def test_a_plan_that_is_tried_has_what_was_measured(measured: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["plan", FILE, "--plan", "dp=2", "--ranks", "2", "--try", "2", "--json", "-"]) == 0
    captured = capfd.readouterr()
    found = records(captured.out)
    (option,) = (each for each in found if each["event"] == "plan")
    assert option["measured_seconds"] > 0 and found[-1]["plan"] == "dp=2"
    assert "measured: a step, median of some on this machine" in captured.err


@pytest.mark.processes
@pytest.mark.slow
def test_a_machine_that_was_not_measured_is_measured_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["plan", FILE, "--plan", "dp=2", "--ranks", "2"]) == 0
    captured = capfd.readouterr()
    assert "this machine is not measured yet" in captured.err
    assert json.loads(machine_file("cpu").read_text())["transport"] == HERE


def test_ranks_are_spread_evenly_over_hosts_whose_links_are_known(measured: Path, tmp_path: Path) -> None:
    inside = machine(transport=HERE)
    between = tuple(replace(each, place="between") for each in inside.links)
    files = {"one": inside, "two": replace(inside, links=(*inside.links, *between))}
    for name, each in files.items():
        save(each, tmp_path / name)
    found = devices_for(Wish(ranks=16, hosts=2, machine=tmp_path / "two"), 1, print)
    assert isinstance(found, Devices)
    assert (found.hosts, found.ranks_per_host, found.common_memory) == (2, 8, False)
    assert found.limit(16) == found.limit(8) and found.threads_of(16) == found.threads_of(8)
    with pytest.raises(MachineError, match="Nothing is known of links between hosts"):
        devices_for(Wish(ranks=16, hosts=2, machine=tmp_path / "one"), 1, print)
    with pytest.raises(PlanError, match="--hosts 3 cannot have as many ranks each of 16"):
        Wish(ranks=16, hosts=3)


CLUSTER_JOB = """
import torch
from torch import nn
import meshloom as ml

def model():
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))

job = ml.Job(
    model=model, loss=lambda model, batch: model(batch).square().mean(), optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
    data=lambda: torch.ones(32, 64), batch_size=16, steps=2,
)
"""


@pytest.mark.slow
def test_a_cluster_of_two_hosts_of_eight_gets_slices_within_hosts(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only slices of the parameters fit, and the network between hosts is a hundred times as slow as within. Priced are the
    plans of data parallelism over all 16 ranks, which are simulated."""
    found: list[Plan] = []

    def over_all(*arguments: Any, **settings: Any) -> list[Plan]:
        found[:] = [
            each
            for each in candidates(*arguments, **settings)
            if each.dp == each.mesh.size == 16 and each.zero >= 2
        ]
        return found

    monkeypatch.setattr(advise, "candidates", over_all)
    (tmp_path / "job.py").write_text(CLUSTER_JOB)
    rates: Any = (("inside", 1e9), ("between", 1e7))
    links = tuple(
        Link(collective=each, ranks=ranks, latency_seconds=0.0, bytes_per_second=rate, residual=0.0, place=place)
        for each in COLLECTIVES for ranks in (2, 8, 16) for place, rate in rates
    )  # fmt: skip
    save(machine(transport=HERE, links=links, cores=8), tmp_path / "cluster")
    words = ["--ranks", "16", "--hosts", "2", "--machine", str(tmp_path / "cluster"), "--memory", "420KiB"]
    code = main(["plan", str(tmp_path / "job.py"), *words, "--json", "-", "--cache", "off"])
    captured = capsys.readouterr()
    assert [str(each) for each in found] == ["dp=16,zero=2", "dp=16,zero=3", "dp=16,zero=3,zero_within=8"]
    told = records(captured.out)
    fits = {each["plan"]: each["fits"] for each in told if each["event"] == "plan"}
    seconds = {each["plan"]: each["step_seconds"] for each in told if each["event"] == "plan"}
    assert not fits["dp=16,zero=2"] and fits["dp=16,zero=3"] and fits["dp=16,zero=3,zero_within=8"]
    assert seconds["dp=16,zero=3,zero_within=8"] < seconds["dp=16,zero=3"]
    assert (
        code == 0 and told[-1]["event"] == "recommended" and told[-1]["plan"] == "dp=16,zero=3,zero_within=8"
    )
    assert told[-1]["why"] in captured.err


@pytest.mark.long
def test_a_disk_is_measured_and_one_in_memory_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_rate, "MOST", 2)
    rate = disk_rate.measure_disk(tmp_path)
    assert 1e5 < rate < 1e12 and not list(tmp_path.iterdir())
    assert replace(machine(), disk_bytes_per_second=rate).disk_rate == rate
    assert machine().disk_rate == DISK_RATE
    monkeypatch.setattr(disk_rate, "keeps_in_memory", lambda _: True)
    assert disk_rate.measure_disk(tmp_path) == 0.0
    with pytest.raises(MachineError, match="A disk of -1.0 bytes per second was not measured"):
        machine(disk_bytes_per_second=-1.0)
