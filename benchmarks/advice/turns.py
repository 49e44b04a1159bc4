"""Runs that stand still between turns, so that what else happens on the machine in these minutes happens to
all of them, and to prices taken in between."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshloom.core.plan import Plan
from meshloom.launch.processes.launcher import run_ranks

RANK = Path(__file__).with_name("rank.py")
STEPS = 8  # at least, and in the first turn
# of a turn: where a machine is faster and slower within seconds, short steps would all be taken in one of its
# moods
SECONDS = 2.5
TURN_SECONDS = 300.0  # then it hangs


class Run(AbstractContextManager["Run"]):
    """A job under a plan on CPU processes. folder: an empty one, for its pipes."""

    def __init__(self, job: str, plan: str, folder: Path) -> None:
        answers, orders = (
            folder / "answers",
            [folder / str(rank) for rank in range(Plan.parse(plan).mesh.size)],
        )
        for each in (answers, *orders):
            os.mkfifo(each)
        # For reading and writing, as opening for one of them waits for the other end.
        self._orders = [os.open(each, os.O_RDWR) for each in orders]
        self._answers = os.fdopen(os.open(answers, os.O_RDWR), "r")
        self._name, self._steps = f"{job} under {plan}", STEPS
        launch = [__file__, plan] if len(orders) > 1 else [str(RANK)]
        self._process = subprocess.Popen(
            [sys.executable, *launch, job, "0", str(answers), "--turns", str(folder)]
        )

    def turn(self) -> dict[str, Any]:
        """What some steps took now, as rank.py says it. The first turn waits for the ranks to start."""
        for each in self._orders:
            os.write(each, f"{self._steps}\n".encode())
        for _ in range(int(TURN_SECONDS)):
            if select.select([self._answers], [], [], 1.0)[0]:
                found = json.loads(self._answers.readline())
                self._steps = max(STEPS, round(SECONDS / statistics.median(found["step_seconds"])))
                return found
            if self._process.poll() is not None:
                break
        raise SystemExit(f"{self._name} failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for each in self._orders:
            os.close(each)  # then ranks that wait for orders end
        self._answers.close()
        try:
            self._process.wait(TURN_SECONDS if kind is None else 0.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


def main() -> int:
    """Launch several ranks."""
    plan = Plan.parse(sys.argv[1])
    return run_ranks(
        [sys.executable, str(RANK), *sys.argv[2:]], plan.mesh, "cpu", str(plan), hang_seconds=0.0
    )


if __name__ == "__main__":
    raise SystemExit(main())
