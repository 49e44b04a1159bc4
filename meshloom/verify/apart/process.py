"""Rank 0's end: a process that compares, as if it were in this one.

    rank 0       begin | gradient | gradient | ... | update | parameter | ...      tensors one at a time
    one device   forward, backward | compared, replaced ...  | optimizer | compared ...

Rank 0 waits for each answer, as it would compute it, so neither process works against the other.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.launch.environment import reference_environment
from meshloom.launch.failure import OUT_OF_MEMORY
from meshloom.launch.processes.child import start_child
from meshloom.launch.processes.rank_process import signal_name
from meshloom.verify.apart.messages import ConnectionEndedError, receive, send
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.compared.compare_evaluation import PlanEvaluation
from meshloom.verify.compared.compare_values import Values
from meshloom.verify.comparing import Comparing, ComparisonResult, OneDevice
from meshloom.verify.reference.step_records import StepRecord


class ReferenceProcess:
    """A process that loads the job for itself; a context, at whose end it has ended. command: what this rank was started
    with. Raises `DeviceError` if it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        here, there = socket.socketpair()
        try:
            environment = reference_environment(there.fileno())
            # with this rank's own process group: whoever ends the rank ends both
            self._process = start_child(
                command, environment=environment, passed=[there.fileno()], own_session=False
            )
        except OSError as error:
            here.close()
            raise DeviceError(f"The process of one device cannot be started: {error.strerror}.") from error
        finally:
            there.close()
        self._connection = here

    def __enter__(self) -> ReferenceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # which ends it
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def compare(self, job: Job, other: OneDevice) -> Comparing:
        """Begins a comparison there, in place of an earlier one. The job is the one that it has loaded."""
        self.call("open", other)
        return _Remote(self)

    def call(self, name: str, *arguments: Any) -> Any:
        """What a method of its comparison returns there. Raises what that raises, and `DeviceError` if the process is
        gone."""
        try:
            send(self._connection, (name, arguments))
            error, found = receive(self._connection)
        except ConnectionEndedError:
            raise self._lost() from None
        if error is not None:
            raise error
        return found

    def _lost(self) -> DeviceError:
        code = self._process.wait()
        hint = OUT_OF_MEMORY if -code == signal.SIGKILL else ""
        how = f"was killed by {signal_name(-code)}{hint}" if code < 0 else f"ended with exit code {code}"
        return DeviceError(
            f"The process of one device, which the plan is compared with, {how}. It holds the whole model: --blocks 2 verifies the same job with fewer of its "
            "repeated blocks."
        )


class _Remote(Comparing):
    """A comparison in that process."""

    def __init__(self, process: ReferenceProcess) -> None:
        self._call = process.call

    def begin(self) -> None:
        self._call("begin")

    def add_gradient(self, name: str, ours: Tensor | None) -> None:
        self._call("add_gradient", name, ours)

    def update(self) -> None:
        self._call("update")

    def add_state(self, name: str, ours: Tensor) -> None:
        self._call("add_state", name, ours)

    def begin_averages(self) -> None:
        self._call("begin_averages")

    def add_average(self, name: str, ours: Tensor) -> None:
        self._call("add_average", name, ours)

    def end(self, ours: StepRecord) -> None:
        self._call("end", ours)

    def go_to(self, step: int) -> None:
        self._call("go_to", step)

    def check_metrics(self, ours: PlanEvaluation, updates: int) -> BetweenSteps:
        return self._call("check_metrics", ours, updates)

    def step_schedulers(self, metrics: Mapping[str, float]) -> None:
        self._call("step_schedulers", metrics)

    def check_saved(self, path: Path, what: str) -> BetweenSteps:
        return self._call("check_saved", path, what)

    def adopt(self, name: str, ours: Tensor) -> None:
        self._call("adopt", name, ours)

    def place(self, of_chunks: Mapping[int, Sequence[Values]]) -> str | None:
        return self._call("place", of_chunks)

    @property
    def passed(self) -> bool:
        return self._call("passed")

    def result(self) -> ComparisonResult:
        return self._call("result")
