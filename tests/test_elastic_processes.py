"""Asynchronous training on real processes: whoever is killed, joins or leaves, it goes on, comes to the same,
and leaves nothing."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from elastic_runs import ElasticRun, left
from killing import running
from safetensors.torch import load_file
from saving_jobs import names_in

from meshloom.telemetry.progress import QUIET
from meshloom.telemetry.run_log import read_events
from meshloom.train.trainer import Trainer
from tests import elastic_job

pytestmark = pytest.mark.processes
NOISE = 0.02  # of the accuracy on 360 digits, from run to run


def wait_for_writing(directory: Path) -> None:
    """Until a server is writing a snapshot, or for a second: it does so every few moments, for a few
    milliseconds."""
    deadline = time.monotonic() + 1
    while not list(directory.glob(".*")) and time.monotonic() < deadline:
        pass


def refuses_connections(address: str) -> bool:
    """Whether nobody listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) != 0


def assert_nothing_left(directory: Path, address: str) -> None:
    """No process, file or socket of the run, within seconds."""
    assert not left(str(directory))
    deadline = time.monotonic() + 10
    while directory.exists() or not refuses_connections(address):
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_one_worker_goes_on_when_its_server_was_killed(tmp_path: Path) -> None:
    """What is lost is said, and done anew with other samples; and what a resumed run does is the rest."""
    plan, out = "dp=1,exchange=async", tmp_path / "out"
    with ElasticRun(
        "steady", plan, tmp_path, "--snapshot-every", "4", "--out", str(out), "--steps", "30"
    ) as run:
        address, directory = run.address()[0], run.directory()
        run.until_updates(14)
        run.of("server", 0).kill()
        assert run.ended() == 0, run.text()
        assert_nothing_left(directory, address)
    assert "server 0 was killed by SIGKILL; it is restarted" in run.text()
    [asynchronous] = run.records("asynchronous")
    told = len(run.records("step")) - 30
    assert 0 < told == asynchronous["lost"]
    (tmp_path / "again").mkdir()
    with ElasticRun("steady", plan, tmp_path / "again", "--out", str(out), "--resume", str(out)) as run:
        assert run.ended() == 0, run.text()
    assert [record["step"] for record in run.records("step")] == list(range(31, 41))
    logged = read_events(out)
    assert [each["step"] for each in logged if each["event"] == "start"] == [0, 30]
    assert [each["event"] for each in logged].count("end") == 2
    found = load_file(out / "step-00000040" / "model.safetensors")
    assert all(bool(each.isfinite().all()) for each in found.values())


@pytest.mark.slow
def test_workers_and_servers_come_and_go(tmp_path: Path) -> None:
    """Two servers, two workers and a third: one is killed, one leaves, one joins, each server is killed,
    strangers knock; the digits are learnt."""
    steps = 300
    with ElasticRun(
        "hasty_digits",
        "dp=2,exchange=async,servers=2,rate_by_age=true",
        tmp_path,
        "--steps",
        str(steps),
        "--snapshot-every",
        "20",
    ) as run:
        address, directory = run.address()[0], run.directory()
        run.until_updates(20)
        run.of("worker", 0).kill()
        joined = run.join()
        run.until_updates(50)
        run.of("server", 0).kill()
        run.until_updates(90)
        run.of("worker", 1).terminate()
        for _ in range(50):
            with socket.create_connection(
                (address.partition(":")[0], int(address.rpartition(":")[2])), timeout=30
            ) as stranger:
                stranger.sendall(random.randbytes(99))
        run.until(lambda: "has left" in run.text() and "has joined" in run.text())
        run.until_updates(130)
        run.of("server", 1).kill()
        assert run.ended() == 0, run.text()
        joined.join(30)
        assert joined.exitcode == 0
        assert_nothing_left(directory, address)
    [asynchronous], evaluation = run.records("asynchronous"), run.records("evaluation")[-1]
    assert sum(asynchronous["ages"].values()) == steps
    assert asynchronous["refused_messages"] >= 50
    assert evaluation["step"] == steps and evaluation["metrics"]["accuracy"] > 0.9
    for sentence in (
        "the run goes on",
        "server 0 was killed by SIGKILL",
        "server 1 was killed by SIGKILL",
        "whose samples are not read again",
    ):
        assert sentence in run.text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_campaign_of_kills(tmp_path: Path) -> None:
    """30 kills and joins of workers and 4 kills of a server, also in the middle of a snapshot."""
    chooser, steps = random.Random(3), 400
    plan = "dp=3,exchange=async,servers=2,rate_by_age=true"
    with Trainer(elastic_job.digits(), plan, devices="simulated", steps=steps, listener=QUIET) as trainer:
        undisturbed = trainer.fit().evaluation["accuracy"]
    with ElasticRun("slow_digits", plan, tmp_path, "--steps", str(steps), "--snapshot-every", "15") as run:
        address, directory = run.address()[0], run.directory()
        run.until_updates(10)
        workers = [run.of("worker", number) for number in range(3)]
        server_kills = sorted(chooser.sample(range(5, 30), 4))
        since = 0  # updates when a server was killed last
        for incident in range(30):
            if incident in server_kills:
                server = chooser.randrange(2)
                # one that dies again and again of being started would end the run
                run.until_updates(since + 1)
                if incident % 2:
                    wait_for_writing(directory / f"server-{server}")
                else:
                    time.sleep(chooser.uniform(0.0, 0.5))
                run.of("server", server).kill()
                since = run.num_updates()
            if len(workers) < 3 or (len(workers) < 6 and chooser.random() < 0.5):
                workers.append(run.join())
            else:
                workers.pop(chooser.randrange(len(workers))).kill()
            time.sleep(chooser.uniform(0.0, 0.4))
            assert run.process.poll() is None, run.text()
        assert run.num_updates() < steps, "the run was over before the campaign"
        assert run.process.wait(600) == 0, run.text()
        assert_nothing_left(directory, address)
    [asynchronous], evaluation = run.records("asynchronous"), run.records("evaluation")[-1]
    print(f"undisturbed {undisturbed:.4f}, campaign {evaluation['metrics']['accuracy']:.4f}, {asynchronous}")
    assert sum(asynchronous["ages"].values()) == steps
    told = len(run.records("step")) - steps
    assert 0 < told == asynchronous["lost"]
    assert run.text().count("it is restarted") == 4
    assert abs(evaluation["metrics"]["accuracy"] - undisturbed) <= NOISE


# --- How a run ends.


@pytest.mark.slow
def test_an_interrupt_ends_everything_with_130(tmp_path: Path) -> None:
    with ElasticRun("steady", "dp=2,exchange=async", tmp_path) as run:
        address, directory = run.address()[0], run.directory()
        run.until_updates(2)
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 130
        assert_nothing_left(directory, address)
    assert run.text().splitlines()[-1] == "Stopped by SIGINT; all processes have ended."


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, 1])
def test_a_run_that_is_asked_to_end_saves_its_newest_update_first(tmp_path: Path, killed: int | None) -> None:
    """No checkpoint and no snapshot was due; then two servers put one together, even if one of them is killed
    meanwhile. A resumed run does the rest."""
    out, plan = tmp_path / "out", "dp=1,exchange=async,servers=2"
    with ElasticRun("steady", plan, tmp_path, "--out", str(out), "--steps", "40") as run:
        address, directory = run.address()[0], run.directory()
        run.until_updates(5)
        run.process.send_signal(signal.SIGTERM)
        if killed is not None:
            run.of("server", killed).kill()
        assert run.ended() == 143
        assert_nothing_left(directory, address)
    said = re.fullmatch(
        rf"Stopped by SIGTERM after update (\d+) of 40, which is saved. Go on with --resume {re.escape(str(out))}.",
        run.text().splitlines()[-1],
    )
    assert said is not None, run.text()
    update = int(said[1])
    assert names_in(out) == [f"step-{update:08d}"]
    if killed is None:
        assert 5 <= update < 40
    (tmp_path / "again").mkdir()
    with ElasticRun("steady", plan, tmp_path / "again", "--out", str(out), "--resume", str(out)) as run:
        assert run.ended() == 0, run.text()
    assert [record["step"] for record in run.records("step")] == list(range(update + 1, 41))


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ElasticRun("steady", "dp=1,exchange=async,servers=2", tmp_path, "--out", str(out)) as run:
        run.until_updates(5)
        for number in (0, 1):
            run.of("server", number).suspend()  # nothing will be saved for ten seconds
        run.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == 143
    assert run.text().splitlines()[-1] == (
        "Stopped by SIGTERM; all processes have ended, before a checkpoint was saved."
    )


@pytest.mark.slow
def test_a_stopped_server_is_started_again(tmp_path: Path) -> None:
    """All workers waited for it, and nothing ended that."""
    with ElasticRun("steady", "dp=1,exchange=async", tmp_path, "--snapshot-every", "4") as run:
        address, directory = run.address()[0], run.directory()
        run.until_updates(6)
        run.of("server", 0).suspend()
        assert run.ended() == 0, run.text()
        assert_nothing_left(directory, address)
    assert "server 0 has been stopped (SIGSTOP) for 10 s, and all workers need it: it is killed" in run.text()
    assert "server 0 was killed by SIGKILL; it is restarted" in run.text()


@pytest.mark.slow
def test_a_worker_that_has_joined_ends_within_its_timeout_when_the_launcher_was_killed(
    tmp_path: Path,
) -> None:
    """6 of 6 were still there for ever, in the end of a context whose connections could not be closed."""
    with (
        ElasticRun("steady", "dp=1,exchange=async", tmp_path, "--steps", "100000") as run,
        ExitStack() as stack,
    ):
        address, key = run.address()
        words = [
            sys.executable,
            "-m",
            "meshloom",
            "train",
            run.target,
            "--join",
            address,
            "--key",
            key,
            "--timeout",
            "20",
        ]
        there = [stack.enter_context(running(words)) for _ in range(3)]
        run.until(lambda: run.text().count("has joined") == 3)
        run.process.kill()
        run.process.wait()
        for each in there:
            _, said = each.communicate(timeout=60)
            assert each.returncode == 1
            assert (
                said.strip()
                == f"PeerLostError: The server at {address} has not been there for 20 s, so this worker ends."
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "more", "code", "sentence"),
    [
        ("failing", (), 1, "a broken share"),
        ("dying", ("--timeout", "6"), 1, "After update 0 no worker has been there for 6 s: worker "),
        ("steady", ("--listen", "203.0.113.1:0"), 2, "Cannot listen at"),
    ],
)
def test_what_ends_a_run_is_one_message(
    job: str, more: tuple[str, ...], code: int, sentence: str, tmp_path: Path
) -> None:
    with ElasticRun(job, "dp=2,exchange=async", tmp_path, *more) as run:
        assert run.ended() == code, run.text()
    assert sentence in run.text()
    assert not left(str(tmp_path))


@pytest.mark.slow
def test_who_cannot_join_is_told_why(tmp_path: Path) -> None:
    def join(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "meshloom", "train", *words], capture_output=True, text=True, timeout=100
        )

    with ElasticRun("steady", "dp=1,exchange=async", tmp_path, "--steps", "2000") as run:
        address, key = run.address()
        run.until_updates(1)
        other = join(run.target, "--plan", "dp=2,exchange=async", "--join", address, "--key", key)
        assert (other.returncode, "has the plan dp=1,exchange=async" in other.stderr) == (2, True), (
            other.stderr
        )
        other = join(run.target.replace("steady", "digits"), "--join", address, "--key", key)
        assert (other.returncode, "This is not the job of the run" in other.stderr) == (2, True), other.stderr
        nobody = join(run.target, "--join", "127.0.0.1:9", "--key", key, "--timeout", "1")
        assert (nobody.returncode, "Nobody at 127.0.0.1:9" in nobody.stderr) == (1, True), nobody.stderr
