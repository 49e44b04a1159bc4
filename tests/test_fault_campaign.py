"""300 faults: a random plan, victim, moment and signal. The launcher ends within its limit and names who it
was, nothing is left, and what is resumed is right."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from meshloom.asynchronous.state.push_shares import PushShares
from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.core.plan import Plan
from tests import fault_job
from tests.killing import command, left, let_run, newest, ranks, running

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("silent_export"),
]
STEPS = 40
SNAPSHOTS_APART = 4  # updates, at most
# for an end: ten times what it takes where the machine is not busy; the runs themselves would go on for
# longer when they hang
LIMIT_SECONDS = 90.0
TIMEOUT = ("--timeout", "30")
SYNCHRONOUS = (
    "dp=2",
    "dp=3",
    "dp=2,zero=1",
    "dp=2,exchange=server,servers=1",
    "dp=2,exchange=ring",
    "pp=2,microbatches=2",
    "tp=2",
)
ASYNCHRONOUS = ("dp=1,exchange=async", "dp=2,exchange=async", "dp=2,exchange=async,servers=2")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[dict[str, torch.Tensor], float]]:
    """By plan: final parameters, and seconds that a run takes. Filled as they are needed."""
    return {}


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place for temporary files, which is empty in the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


def words(plan: str, out: Path, *more: str) -> list[str]:
    job = "reading" if plan == "dp=2" else "counting" if plan in ASYNCHRONOUS else "job"
    return command(f"fault_job.py:{job}", plan, out, *TIMEOUT, *more)


def last(out: Path) -> Path:
    return out / f"step-{STEPS:08}"


def final(out: Path) -> dict[str, torch.Tensor]:
    return load_file(last(out) / "model.safetensors")


def lost_shares(plan: str, out: Path) -> int:
    """Shares that were given out and are in no update. The others are in one each, and nothing else is."""
    state: Any = Checkpoint.open(last(out)).values["asynchronous"]
    given_out, ages = state["state"]["next_share"], state["state"]["ages"]
    assert sum(ages.values()) == STEPS
    shares = PushShares(fault_job.counting, Plan.parse(plan))
    expected = Counter(index for share in range(given_out) for index in shares.find(share).indices)
    unused = [expected[index] - used for index, used in enumerate(final(out)["used"].tolist())]
    assert min(unused) >= 0, "a sample was used twice in an epoch"
    lost = given_out - STEPS
    assert 6 * lost <= sum(unused) * Plan.parse(plan).dp <= 12 * lost, "batches are of 12 and 6"
    return lost


def check_asynchronous(plan: str, out: Path, victim: str) -> int:
    """As docs/asynchronous.md says what is lost when; the number of lost shares."""
    lost, workers = lost_shares(plan, out), Plan.parse(plan).dp
    # of each worker the share under way, and the update after a snapshot of which a server has not heard
    with_a_server = SNAPSHOTS_APART + 2 * workers
    assert lost <= (with_a_server if victim.startswith("server") else workers - 1)
    assert all(bool(each.isfinite().all()) for each in final(out).values())
    return lost


def run_to_the_end(plan: str, out: Path, *more: str) -> float:
    began = time.monotonic()
    done = subprocess.run(
        words(plan, out, *more),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


def there(launcher: psutil.Process, plan: str) -> dict[str, psutil.Process]:
    """Who can be hit, by name."""
    found = {"launcher": launcher}
    try:
        for rank, process in ranks(launcher).items():
            found[f"rank {rank}"] = process
            found |= {f"data worker of rank {rank}": child for child in process.children()[:1]}
        for child in launcher.children():
            role = json.loads(child.environ().get("MESHLOOM_ROLE", "{}"))
            if role:
                found[f"{role['kind']} {role['number']}"] = child
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass
    return found


@pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(60, 300))]
)
@pytest.mark.every
def test_a_fault(
    seed: int, undisturbed: dict[str, tuple[dict[str, torch.Tensor], float]], scratch: Path, tmp_path: Path
) -> None:
    chooser = random.Random(seed)
    plan = chooser.choice(ASYNCHRONOUS if seed % 3 == 0 else SYNCHRONOUS)
    if plan not in undisturbed:
        seconds = run_to_the_end(plan, tmp_path / "undisturbed")
        undisturbed[plan] = final(tmp_path / "undisturbed"), seconds
        assert plan in SYNCHRONOUS or not lost_shares(plan, tmp_path / "undisturbed")
    expected, seconds = undisturbed[plan]
    out, number = tmp_path / "run", chooser.choice(SIGNALS)
    with running(words(plan, out)) as process:
        launcher = psutil.Process(process.pid)
        let_run(process, chooser.uniform(0.0, seconds))
        victims = there(launcher, plan) if process.poll() is None else {}
        name = chooser.choice(sorted(victims)) if victims else ""
        hit = False
        if name:
            try:
                victims[name].send_signal(number)
                hit = True
                # nobody watches it: it goes on when somebody lets it
                if name == "launcher" and number == signal.SIGSTOP:
                    time.sleep(2.0)
                    victims[name].send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                pass
        story = f"seed {seed}: {plan}, {signal.Signals(number).name} to {name or 'nobody'}"
        try:
            _, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{story}: it hangs, while {victims.keys()}")
    print(story, process.returncode)
    deadline = time.monotonic() + 20
    while (rest := left(out)) or os.listdir(scratch):
        assert time.monotonic() < deadline, f"{story}: left are {rest} and {os.listdir(scratch)}\n{errors}"
        time.sleep(0.1)
    assert not list(Path("/dev/shm").glob(f"meshloom-{os.getuid()}-*"))
    assert errors.count("Traceback") == 0, f"{story}\n{errors}"
    done = last(out).exists()
    if hit and number == signal.SIGKILL and process.returncode == 1:
        who = re.sub(r"data worker of (rank \d)", r"(\1|process \\d+)", name)
        who = re.sub(r"^worker \d", r"(\g<0>|a worker)", who)  # which has no number before it is let in
        assert re.search(rf"(?i){who}\b", errors), f"{story}\n{errors}"
    assert done or process.returncode != 0, f"{story}: it ended well without its work\n{errors}"
    more = ("--resume", str(out)) if newest(out) else ("--overwrite",) if out.exists() else ()
    if not done:
        run_to_the_end(plan, out, *more)
    lost = check_asynchronous(plan, out, name) if plan in ASYNCHRONOUS else 0
    if not lost and (plan in SYNCHRONOUS or Plan.parse(plan).dp == 1):
        found = final(out)
        assert all(torch.equal(found[key], value) for key, value in expected.items()), f"{story}: other bits"
