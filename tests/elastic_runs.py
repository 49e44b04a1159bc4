"""Asynchronous runs of the command line as processes that are killed, joined and left, for the tests of
that."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from processes import CONTEXT

FILE = str(Path(__file__).with_name("elastic_job.py"))
WAIT_SECONDS = 120.0


class ElasticRun:
    """`meshloom train` on processes. It writes its records to `directory`/records and what it prints to
    `directory`/text."""

    def __init__(self, job: str, plan: str, directory: Path, *more: str) -> None:
        self.target = f"{FILE}:{job}"
        self._records, self._text = directory / "records", directory / "text"
        self._words = [
            sys.executable,
            "-m",
            "meshloom",
            "train",
            self.target,
            "--plan",
            plan,
            "--devices",
            "cpu",
            "--json",
            str(self._records),
            *more,
        ]
        self._joined: list[Any] = []

    def __enter__(self) -> Self:
        self._records.touch()
        with self._text.open("w") as text:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            self.process = subprocess.Popen(
                self._words, stdout=text, stderr=subprocess.STDOUT, env=environment
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait()
        for each in self._joined:
            each.kill()
            each.join()
            each.close()

    def records(self, event: str) -> list[dict[str, Any]]:
        """Those of one kind so far."""
        lines = self._records.read_text().splitlines()
        return [
            record for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == event
        ]

    def text(self) -> str:
        return self._text.read_text()

    def until(self, done: Callable[[], object]) -> None:
        """Wait for it; the run must not end before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not done():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.03)

    def until_updates(self, number: int) -> None:
        self.until(lambda: self.num_updates() >= number)

    def num_updates(self) -> int:
        """Made so far, those that were lost included."""
        return self._records.read_text().count('"event": "step"')

    def ended(self) -> int:
        """Its exit code."""
        return self.process.wait(WAIT_SECONDS)

    def address(self) -> tuple[str, str]:
        """HOST:PORT and key file, as printed for those who want to join."""
        self.until(lambda: "--key" in self.text())
        found = re.search(r"--join (\S+) --key (\S+)", self.text())
        assert found
        return found[1], found[2]

    def directory(self) -> Path:
        """Where servers keep their snapshots."""
        return Path(self.address()[1]).parent

    def of(self, kind: str, number: int) -> psutil.Process:
        """The process that the launcher has started as this, once it is there."""
        while True:
            for child in psutil.Process(self.process.pid).children():
                try:
                    role = json.loads(child.environ().get("MESHLOOM_ROLE", "{}"))
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                if (role.get("kind"), role.get("number")) == (
                    kind,
                    number,
                ) and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            assert self.process.poll() is None, self.text()

    def join(self) -> Any:
        """A further worker, as a process of the test."""
        address, key = self.address()
        process = CONTEXT.Process(
            target=_join,
            args=([*_words(self.target), "--join", address, "--key", key], dict(os.environ)),
            daemon=True,
        )
        process.start()
        self._joined.append(process)
        return process


def _words(target: str) -> list[str]:
    return ["train", target]


def _join(words: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    from meshloom.cli.main import main

    sys.exit(main(words))


def left(text: str) -> list[psutil.Process]:
    """Processes with this in their command line that do not end within seconds."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(text in word for word in process.info["cmdline"] or ())
    ]
    return [
        process
        for process in psutil.wait_procs(found, timeout=10)[1]
        if process.status() != psutil.STATUS_ZOMBIE
    ]
