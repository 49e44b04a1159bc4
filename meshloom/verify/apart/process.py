"""Rank 0's end: a process that compares, as if it were in this one.

    rank 0       begin | gradient | gradient | ... | update | parameter | ...      tensors one at a time
    one device   forward, backward | compared, replaced ...  | optimizer | compared ...

Rank 0 waits for each answer, as it would compute it, so neither process works against the other.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.launch.environment import reference_environment
from meshloom.launch.failure import OUT_OF_MEMORY
from meshloom.launch.processes.child import start_child
from meshloom.launch.processes.rank_process import signal_name
from meshloom.verify.apart.messages import ConnectionEndedError, receive, send
from meshloom.verify.comparison_run import ComparisonRun, OneDevice


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

    def compare(self, job: Job, other: OneDevice) -> ComparisonRun:
        """Begins a comparison there, in place of an earlier one. The job is the one that it has loaded."""
        self.call("open", other)
        return cast(ComparisonRun, _Remote(self))

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


class _Remote:
    """A `ComparisonRun` in that process: what is called here is called there."""

    def __init__(self, process: ReferenceProcess) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return partial(self._process.call, name)
