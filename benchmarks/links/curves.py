"""Loss against wall time of the digits example under several exchanges, with even ranks and with one that is
three times slower, by sleeping.

Plans whose ranks wait for each other run in ranks on four hosts. Asynchronous ones are commands: server and
first worker on host 0, a worker that joins on each of the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from digits import MEETING, SLEEP, pushing, slept
from network import Host, within
from ranks import free_port, on_hosts

import meshloom as ml
from meshloom.telemetry.progress import Listener, Progress

RANKS = 4
WAITING = {
    "all_reduce": f"dp={RANKS}",
    "server": f"dp={RANKS},exchange=server",
    "local_sgd": f"dp={RANKS},exchange=local_sgd,local_steps=8",
}
PUSHING = {  # dp=1 starts one worker; the others join
    "bounded": "dp=1,exchange=async,staleness=4,rate_by_age=true",
    "async": "dp=1,exchange=async,rate_by_age=true",
}
SECONDS_PER_SAMPLE = 0.002  # slept in the loss: 32 ms for a rank's share, beside some 5 ms that it computes
SLOWER = 3.0
STEPS = 230
SAMPLES = 16  # of a rank's share of a batch, and of an update
START_SECONDS, MOST_SECONDS = 60.0, 300.0


def loss_curves(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """A record per plan and kind of ranks: seconds and loss of every step or update, samples in each, the
    accuracy at the end."""
    found: list[dict[str, Any]] = []
    for slower in (1.0, SLOWER):
        for exchange, plan in WAITING.items():
            what = {
                "part": "curves",
                "slower": slower,
                "exchange": exchange,
                "plan": plan,
                "samples": SAMPLES * RANKS,
            }
            found.append(what | on_hosts(hosts, range(RANKS), _train, plan, slower)[0])
        for exchange, plan in PUSHING.items():
            what = {
                "part": "curves",
                "slower": slower,
                "exchange": exchange,
                "plan": plan,
                "samples": SAMPLES,
            }
            found.append(what | _push(hosts[:RANKS], plan, slower))
    return found


def asynchronous() -> ml.Job:
    """As many samples as the other plans', for `meshloom train`."""
    return pushing(STEPS * RANKS, SAMPLES)


def _train(plan: str, slower: float) -> dict[str, Any]:
    """slower: how many times the last rank's samples take as long as the others'."""
    seconds: list[float] = []
    losses: list[float] = []

    def told(progress: Progress) -> None:
        seconds.append(time.monotonic() - began)
        losses.append(progress.loss)

    listener = Listener(started=lambda text: None, note=lambda text: None, step=told)
    last = int(os.environ["RANK"]) == RANKS - 1
    job = slept(SECONDS_PER_SAMPLE * (slower if last else 1.0), STEPS)
    with ml.Trainer(job, plan, devices="cpu", transport="gloo", listener=listener, cache="off") as trainer:
        began = time.monotonic()
        summary = trainer.fit()
    return {"seconds": seconds, "losses": losses, "accuracy": summary.evaluation["accuracy"]}


def _push(hosts: Sequence[Host], plan: str, slower: float) -> dict[str, Any]:
    """The same of workers, which begin when all are there."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        address = f"{hosts[0].address}:{free_port()}"

        def start(host: Host, *words: str) -> subprocess.Popen[bytes]:
            sleep = SECONDS_PER_SAMPLE * (slower if host is hosts[-1] else 1.0)
            target = f"{__file__}:asynchronous"
            environment = os.environ | {SLEEP: str(sleep), MEETING: folder, "OMP_NUM_THREADS": "1"}
            text = stack.enter_context((place / f"text {host.number}").open("w"))
            command = [*within(host.holder), sys.executable, "-m", "meshloom", "train", target, *words]
            process = subprocess.Popen(command, stdout=text, stderr=text, env=environment)
            stack.callback(_end, process)
            return process

        records = place / "records"
        records.touch()
        first = start(
            hosts[0],
            "--plan",
            plan,
            "--devices",
            "cpu",
            "--listen",
            address,
            "--out",
            f"{place}/out",
            "--json",
            str(records),
        )
        key = _until(first, place, lambda: next(iter(place.glob("out/**/worker.key")), None))
        for host in hosts[1:]:
            start(host, "--join", address, "--key", str(key))
        _until(first, place, lambda: len(list(place.glob("here *"))) == len(hosts))
        (place / "begun").touch()
        return _followed(first, place, records)


def _followed(run: subprocess.Popen[bytes], place: Path, records: Path) -> dict[str, Any]:
    """Seconds from now to each update, to what the clock of this machine tells when its record is there."""
    began = time.monotonic()
    seconds: list[float] = []
    losses: list[float] = []
    accuracy = 0.0
    with records.open() as lines:
        while line := _next_line(lines, run, began + MOST_SECONDS):
            event = json.loads(line)
            if event["event"] == "step":
                seconds.append(time.monotonic() - began)
                losses.append(event["loss"])
            elif event["event"] == "evaluation":
                accuracy = event["metrics"]["accuracy"]
    if run.wait(MOST_SECONDS):
        raise SystemExit(f"An asynchronous run failed.\n{(place / 'text 0').read_text()}")
    return {"seconds": seconds, "losses": losses, "accuracy": accuracy}


def _next_line(lines: Any, run: subprocess.Popen[bytes], deadline: float) -> str:
    """The next whole one, once it is written; "": the run is over, or it is late."""
    part = ""
    while not part.endswith("\n"):
        over = run.poll() is not None or time.monotonic() > deadline
        more = lines.readline()
        part += more
        if not more:
            if over:
                return ""
            time.sleep(0.005)
    return part


def _until(run: subprocess.Popen[bytes], place: Path, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + START_SECONDS
    while not (what := found()):
        if run.poll() is not None or time.monotonic() > deadline:
            texts = "\n".join(path.read_text() for path in sorted(place.glob("text *")))
            raise SystemExit(
                f"The workers of an asynchronous run were not there within {START_SECONDS:g} s.\n{texts}"
            )
        time.sleep(0.02)
    return what


def _end(process: subprocess.Popen[bytes]) -> None:
    """Those that joined leave by themselves when the run is over."""
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
