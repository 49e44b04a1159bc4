"""One process of a run, as the launcher sees it: its reports, its output, how it ended."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshloom.comm.liveness.activity import PAGE_BYTES, ActivitySnapshot, new_page, read
from meshloom.launch.child_environment import with_report
from meshloom.launch.events import STACK_SIGNAL
from meshloom.launch.failure import OUT_OF_MEMORY, Failure
from meshloom.launch.processes.child import start_child

CHUNK_BYTES = 1 << 16
PIPE_BYTES = 1 << 20  # the usual maximum of a pipe's capacity on Linux


class RankProcess:
    """A process that leads its own session; its creator closes it.

    name: like "rank 1 (dp=1)", for messages.
    prefix: of its output, which goes to stderr line by line; None: it has the launcher's stdout and stderr.
    passed: descriptors that it inherits.
    joining, joined: whether it has reported so.
    saves: likewise, that it saves its state when a signal asks it to end.
    events: its other reports, until they are taken.
    stack: lines of the one that it was asked for.
    failure, failed_at: what ended it, once known, and when the launcher noticed.
    reported_failure: whether it has reported that itself.
    exit_code: None until `reap_if_ended` has noticed its end.
    """

    def __init__(
        self, name: str, prefix: str | None, command: Sequence[str], environment: Mapping[str, str],
        passed: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.name = name
        self.prefix = prefix
        self.events: list[dict[str, Any]] = []
        self.stack: list[str] = []
        self.joining = False
        self.joined = False
        self.saves = False
        self.failure: Failure | None = None
        self.failed_at = 0.0
        self.reported_failure = False
        self.exit_code: int | None = None
        page = _page_file()
        here, there = os.pipe()
        try:
            self._memory = mmap.mmap(page, PAGE_BYTES)
            self._process = start_child(
                command,
                environment=with_report(environment, there, page),
                passed=[there, page, *passed],
                output=None if prefix is None else subprocess.PIPE,
            )
        except BaseException:
            os.close(here)
            raise
        finally:
            os.close(there)
            os.close(page)
        self._report = _Lines(here)
        self._output = _Lines(self._process.stdout.fileno()) if self._process.stdout else None

    @property
    def group(self) -> int:
        """The process group that it leads."""
        return self._process.pid

    @property
    def how_it_ended(self) -> str:
        """As the end of a sentence."""
        code = self.exit_code or 0
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def doing(self) -> ActivitySnapshot | None:
        """Its current activity, or that at its end; None while it is writing it."""
        with memoryview(self._memory) as page:
            return read(page)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors to read from."""
        return [lines.descriptor for lines in (self._report, self._output) if lines]

    def read(self, descriptor: int) -> bool:
        """Read at most `CHUNK_BYTES`: other processes have their turn. False when nothing can follow."""
        lines = self._report if descriptor == self._report.descriptor else self._output
        assert lines
        self._take(lines)
        return not lines.ended

    def send(self, number: int) -> None:
        """Send a signal to the process and its children, until it is reaped: its number may be reused."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.group, number)

    def ask_to_stop(self, number: int) -> None:
        """Send a signal to the process alone: it still needs its children."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.group, number)

    def ask_for_stack(self) -> None:
        """Make the process report the stack of its main thread (`joining.py` has installed the handler)."""
        self.ask_to_stop(STACK_SIGNAL)

    def reap_if_ended(self, wait: bool = False) -> bool:
        """Whether it has ended since the last call; then kill its process group, read its last output."""
        if self.exit_code is not None or (self._process.wait() if wait else self._process.poll()) is None:
            return False
        self.send(signal.SIGKILL)
        self.exit_code = self._process.returncode
        for lines in (self._report, self._output):
            # not until the end of the file: a process in another session may still write
            for _ in range(PIPE_BYTES // CHUNK_BYTES):
                if not lines or not self._take(lines):
                    break
        if self.exit_code and self.failure is None:
            doing = f" while {self.doing()}"
            message = f"ended with exit code {self.exit_code}{doing}, and did not say why"
            if self.exit_code < 0:
                hint = OUT_OF_MEMORY if -self.exit_code == signal.SIGKILL else ""
                message = f"was killed by {signal_name(-self.exit_code)}{hint}{doing}"
            self._note(Failure(who=self.name, message=f"{message}."))
        return True

    def close(self) -> None:
        """End it, and close its pipes."""
        self.send(signal.SIGKILL)
        self.reap_if_ended(wait=True)
        self._print_rest()
        if self._process.stdout:
            self._process.stdout.close()
        os.close(self._report.descriptor)
        self._memory.close()

    def _take(self, lines: _Lines) -> bool:
        """Whether there was something to read."""
        there = lines.read()
        for line in there or ():
            self._hear(line) if lines is self._report else self._print(line)
        if lines is self._output and (lines.ended or len(lines.rest) >= CHUNK_BYTES):
            self._print_rest()
        return there is not None

    def _hear(self, line: bytes) -> None:
        if not line.startswith(b"{"):
            self.stack.append(line.decode(errors="replace"))
            return
        event = json.loads(line)
        kind = event.pop("event")
        if kind == "failed":
            if not self.failure:
                self.reported_failure = True
                self._note(Failure(**event))
        elif kind == "saves":
            self.saves = True
        elif kind not in ("joining", "joined"):
            self.events.append({"event": kind, **event})
        self.joining = self.joining or kind == "joining"
        self.joined = self.joined or kind == "joined"

    def _note(self, failure: Failure) -> None:
        self.failure, self.failed_at = failure, time.monotonic()

    def _print(self, line: bytes) -> None:
        # the terminal is gone, or the pipe is closed: the ranks must still be ended
        with suppress(OSError):
            sys.stderr.write(f"{self.prefix} {line.decode(errors='replace')}\n")
            sys.stderr.flush()

    def _print_rest(self) -> None:
        """Print an incomplete last line. That of the reports is of a killed rank, and is dropped."""
        if self._output and self._output.rest:
            self._print(self._output.rest)
            self._output.rest = b""


class _Lines:
    """The lines from a pipe. rest: an incomplete line. ended: whether all writers have closed it."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.rest = b""
        self.ended = False

    def read(self) -> list[bytes] | None:
        """The lines that end within the next `CHUNK_BYTES`; None if there is nothing to read now, or ever."""
        try:
            text = os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return None
        self.ended = not text
        *lines, self.rest = (self.rest + text).split(b"\n")
        return None if self.ended else lines


def _page_file() -> int:
    """The descriptor of an anonymous file of one page, in memory: writing pages to a disk would delay the writer."""
    descriptor = os.memfd_create("activity")
    os.write(descriptor, new_page())
    return descriptor


def signal_name(number: int) -> str:
    """Like SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
