"""What ended a process, in one message: the error, the rank and its place, the line of the user's own code."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshloom.errors import DeviceError, MeshloomError, PeerLostError
from meshloom.launch.environment import current_seat, launched_plan
from meshloom.launch.telling import tell
from meshloom.launch.wording import capital, rank_name
from meshloom.mesh import Mesh
from meshloom.plan import Plan


def report_failure(error: BaseException, mesh: Mesh | None = None) -> int:
    """Tell the launcher, or whoever reads stderr, what ended this process; the exit code that belongs to it.

    One message: the error, this rank and its place, and the line of the user's own code that it came from; with the traceback
    where meshloom does not know the error. `mesh` gives the place under torchrun; our launcher's plan says it too.
    """
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, EndedError):
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    plan = launched_plan()
    failure = Failure(
        who=_who(mesh or (Plan.parse(plan).mesh if plan else None)),
        kind=type(error).__name__,
        message=str(error)[:20_000],
        line=own_line(error),
        traceback="" if isinstance(error, MeshloomError) else "".join(traceback.format_exception(error))[-50_000:],
        consequence=isinstance(error, PeerLostError),
        exit_code=error.exit_code if isinstance(error, MeshloomError) else 1,
    )
    if not tell({"event": "failed", **vars(failure)}):
        # One short line of each rank that only noticed: the cause is in another rank's message.
        first_line, _, _ = failure.message.partition("\n")
        text = f"{failure.kind} on {failure.who}: {first_line}" if failure.consequence and failure.who else str(failure)
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return failure.exit_code


def leave(exit_code: int) -> None:
    """End this process now. An ordinary exit would first wait for operations under way, which a rank that has failed never completes."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _who(mesh: Mesh | None) -> str:
    try:
        seat = current_seat()
    except DeviceError:  # told only half, which may be the very error
        return ""
    return rank_name(seat.rank, mesh) if seat and seat.size > 1 else ""


class EndedError(Exception):
    """The processes of a run have ended. The message is all that the user has to read."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a process, as it travels from a rank to its launcher.

    who: the rank, "" if there is only one.
    kind, message: of the error; `kind` is "" where there was none, and the message a predicate of `who`.
    line, traceback: where, as far as that helps.
    consequence: whether another rank's failure is the cause.
    """

    who: str
    kind: str
    message: str
    line: str
    traceback: str
    consequence: bool
    exit_code: int

    def of(self, who: str) -> Failure:
        """The same, of a process that did not know what it is called."""
        return replace(self, who=who)

    def __str__(self) -> str:
        where = f"{self.kind} on {self.who}" if self.kind and self.who else self.kind or capital(self.who)
        text = f"{where}{':' if self.kind else ''} {self.message}" if self.message else where
        return "\n".join(part for part in (self.traceback.rstrip(), text, f"  {self.line}" if self.line else "") if part)


def own_line(error: BaseException) -> str:
    """The deepest line of the user's own code in the traceback, "file:number: text"; "" if there is none. A cause comes before what it led to."""
    chain = [error]
    while (before := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)) and before not in chain:
        chain.append(before)
    frames = [[(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(each.__traceback__)] for each in chain]
    # A data worker's traceback arrives as text.
    told = [
        [(name, int(number)) for name, number in re.findall(r'File "([^"]+)", line (\d+)', str(each))]
        for each in chain
        if "Original Traceback" in str(each)
    ]
    ours = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", f"{sysconfig.get_path('scripts')}{os.sep}", "<")
    installed = (*ours, *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")))
    for others in (installed, ours):  # what is installed may be the user's own package
        for trace in [*reversed(told), *reversed(frames)]:
            for name, number in reversed(trace):
                if not name.startswith(others):
                    return f"{_shown(name)}:{number}: {_source(name, number)}".rstrip(": ")
    return ""


def _shown(name: str) -> str:
    with suppress(ValueError, OSError):
        return str(Path(name).relative_to(Path.cwd()))
    return name


def _source(name: str, number: int) -> str:
    return linecache.getline(name, number).strip()
