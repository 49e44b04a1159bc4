"""The message about what ended a process: the error, the rank and its place, the user's own lines."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshloom.core.errors import DataError, DeviceError, MeshloomError, PeerLostError
from meshloom.core.mesh import Mesh
from meshloom.core.modules.packages import is_of_package
from meshloom.core.plan import Plan
from meshloom.launch.environment import launched_plan, launched_rank, wants_full_traceback
from meshloom.launch.events import send_event
from meshloom.launch.names import capital, rank_name


def report_failure(error: BaseException, mesh: Mesh | None = None, left_by: Sequence[str] = ()) -> int:
    """Report to the launcher, or on stderr, what ended this process; the exit code for it.

    One message: the error, this rank and its place, and the lines of the user's own code that led to it, the
    deepest last. The whole traceback is shown where the error is not in the user's code, and with
    `MESHLOOM_TRACEBACK=full`; an error that meshloom explains itself has the deepest line alone.
    mesh: gives the rank's place under torchrun; under our launcher the plan does. left_by: of `World`.
    """
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, EndedError):
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    if isinstance(error, SystemExit):
        return _report_exit(error)
    failure = _failure_of(error, mesh)
    if left_by:
        text = f"{left_by[0]} has come to its end while this rank waits for it: {failure.message}"
        failure = replace(failure, message=text, consequence=False)
    if not send_event({"event": "failed", **vars(failure)}):
        # one short line of a rank that only lost another: the cause is in that rank's message
        text = str(failure)
        if failure.consequence and failure.who:
            first_line, _, _ = failure.message.partition("\n")
            text = f"{failure.kind} on {failure.who}: {first_line}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return failure.exit_code


def _failure_of(error: BaseException, mesh: Mesh | None) -> Failure:
    plan = launched_plan()
    error = _lost_data_worker(error) or error
    kind, message = _told(error)
    explained = isinstance(error, MeshloomError)
    lines = own_line(error) if explained else own_lines(error)
    whole = wants_full_traceback() or not (explained or lines)
    return Failure(
        who=_who(mesh or (Plan.parse(plan).mesh if plan else None)),
        kind=kind,
        message=message[:20_000],
        line=own_line(error) if whole else lines,
        traceback=_stack(error)[-50_000:] if whole else "",
        consequence=isinstance(error, PeerLostError),
        exit_code=error.exit_code if isinstance(error, MeshloomError) else 1,
    )


def _lost_data_worker(error: BaseException) -> DataError | None:
    """The error that torch raises wherever the main thread is when a data worker ends, in one sentence."""
    each: BaseException | None = error
    while each is not None and not isinstance(each, MeshloomError | KeyboardInterrupt):
        if found := _DATA_WORKER_ENDED.search(str(each)):
            how = "ended unexpectedly"
            if found[3]:
                hint = OUT_OF_MEMORY if found[3].startswith("Killed") else ""
                how = f"was killed by a signal: {found[3].strip()}{hint}"
            return DataError(
                f"A process that reads data for this rank (process {found[1]}, of Job(num_workers=...)) {how}. Go on from a checkpoint with --resume; "
                "fewer workers need less memory, and num_workers=0 reads in the rank's own process."
            )
        each = each.__cause__ or each.__context__
    return None


def _report_exit(error: SystemExit) -> int:
    """`sys.exit` in the job: its text is printed as Python does, but once; a launcher gets the reason."""
    if not error.code:
        return 0
    text = "" if isinstance(error.code, int) else str(error.code)
    code = error.code if isinstance(error.code, int) else 1
    message = text or f"left with exit code {code}."
    failure = replace(_failure_of(error, None), message=message, traceback="", exit_code=code)
    if not send_event({"event": "failed", **vars(failure)}) and text:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return code


def report_interrupt(error: KeyboardInterrupt) -> int:
    """Report Ctrl-C, or what a script raises as such, on one rank of several; the exit code for it."""
    failure = replace(
        _failure_of(error, None),
        kind="",
        message="was interrupted.",
        line=own_line(error),
        traceback="",
        exit_code=130,
    )
    if not send_event({"event": "failed", **vars(failure)}):
        print(failure, file=sys.stderr, flush=True)  # noqa: T201
    return failure.exit_code


def report_stop(text: str, exit_code: int, *, main: bool) -> None:
    """Report to the launcher, or on stderr if it is the `main` rank, that this rank ends on request."""
    failure = Failure(message=text, exit_code=exit_code)
    if not send_event({"event": "failed", **vars(failure)}) and main:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def leave(exit_code: int) -> None:
    """End this process now. An ordinary exit would first wait for collectives that never complete."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _who(mesh: Mesh | None) -> str:
    try:
        launched = launched_rank()
    except DeviceError:  # variables are missing, which may be the very error
        return ""
    return rank_name(launched.rank, mesh) if launched and launched.size > 1 else ""


class EndedError(Exception):
    """The processes of a run have ended. The message is complete for the user."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a process, as a rank reports it to its launcher.

    who: the rank, "" if there is only one.
    kind, message: of the error; where there was none, `kind` is "" and the message a predicate of `who`.
    line, traceback: where, as far as that helps: the user's own lines, and Python's traceback without its
        last line.
    consequence: whether another rank's failure is the cause.
    """

    who: str = ""
    kind: str = ""
    message: str
    line: str = ""
    traceback: str = ""
    consequence: bool = False
    exit_code: int = 1

    def of(self, who: str) -> Failure:
        """The same, of a process that does not know its name."""
        return replace(self, who=who)

    def __str__(self) -> str:
        where = f"{self.kind} on {self.who}" if self.kind and self.who else self.kind or capital(self.who)
        text = f"{where}{':' if self.kind else ''} {self.message}".strip() if self.message else where
        lines = textwrap.indent(self.line, "  ", lambda line: True)
        return "\n".join(part for part in (self.traceback.rstrip(), text, lines) if part)


def own_line(error: BaseException) -> str:
    """The deepest line of the user's own code, "file:number: text", or "". Causes come before effects."""
    chain = [(_frames(each), _worker_frames(each)) for each in _chain(error)]
    return _own_line([*(told for _, told in reversed(chain)), *(frames for frames, _ in reversed(chain))])


def own_line_of(stack: Sequence[str]) -> str:
    """The same, of the lines of a stack that faulthandler has written, the deepest first."""
    return _own_line([_frames_in("\n".join(reversed(stack)))])


def _own_line(traces: Sequence[Sequence[Frame]]) -> str:
    for is_others in (_is_installed, _is_ours):  # an installed package may be the user's own
        for trace in traces:
            for frame in reversed(trace):
                if not is_others(frame[0]) and not _is_of_python(frame[0]):
                    return line_of(frame)
    return ""


def own_lines(error: BaseException) -> str:
    """The user's own lines that led to the error, the deepest last; "" if the error is elsewhere."""
    text: list[str] = []
    theirs = False  # whether the user's code is deepest, not counting libraries
    for number, each in enumerate(chain := _chain(error)):
        if number:
            how = "caused by" if each is chain[number - 1].__cause__ else "while handling"
            text.append(f"{how} {': '.join(filter(None, _told(each)))}")
        frames = [
            frame
            for frame in [*_frames(each), *_worker_frames(each)]
            if frame[0].startswith(_MESHLOOM) or not _is_installed(frame[0])
        ]
        lines = [line_of(frame) for frame in frames if not frame[0].startswith(_MESHLOOM)]
        theirs = not frames[-1][0].startswith(_MESHLOOM) if frames else theirs
        if len(lines) > _MOST_LINES:  # of a function that calls itself
            lines[_MOST_LINES // 2 : -_MOST_LINES // 2] = ["..."]
        text += lines
    *_, last = [("", 0), *_frames(chain[-1])]
    if last[0].startswith(_AUTOGRAD) and not theirs:
        hint = "in backward, where no line of yours runs. torch.autograd.set_detect_anomaly(True) in the job file shows which one led to it."
        return "\n".join([*text, hint])
    return "\n".join(text) if theirs else ""


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, what caused that, ..."""
    chain: list[BaseException] = []
    before: BaseException | None = error
    while before is not None and before not in chain:
        chain.append(before)
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    return chain


def _frames(error: BaseException) -> list[Frame]:
    """Of its traceback, the deepest last; with the place of a syntax error."""
    stack = _without_modes(traceback.extract_tb(error.__traceback__))
    frames = [(frame.filename, frame.lineno or 0) for frame in stack]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    return frames


def _without_modes(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """A mode of ours that watches the user's operators and calls the one that failed has no part in the error."""
    ours = [each for each in stack if each.filename.startswith(_MESHLOOM)]
    if not ours or "func(*" not in (ours[-1].line or ""):
        return list(stack)
    modes = ("__torch_function__", "__torch_dispatch__")
    first = next((index for index, each in enumerate(stack) if each in ours and each.name in modes), None)
    return [each for index, each in enumerate(stack) if first is None or index < first or each not in ours]


def _worker_frames(error: BaseException) -> list[Frame]:
    """A data worker's traceback arrives as text."""
    return _frames_in(str(error)) if _TRACEBACK in str(error) else []


def _frames_in(text: str) -> list[Frame]:
    return [(name, int(number)) for name, number in re.findall(r'File "([^"]+)", line (\d+)', text)]


def _told(error: BaseException) -> tuple[str, str]:
    """The error's kind, and its message with its notes."""
    kind, message = type(error).__name__, str(error)
    if isinstance(error, SyntaxError):
        message = error.msg
    if _WORKERS in message:  # torch adds the worker's traceback, of which the last lines are the message
        *_, rest = re.split(r"^(?:  .*\n)+", message, flags=re.MULTILINE)
        message = f"{rest.strip().removeprefix(f'{kind}: ')} (in a data worker)"
    return kind, "\n".join([message, *getattr(error, "__notes__", ())]).strip()


def _stack(error: BaseException) -> str:
    """Python's traceback without the last line, which is the error."""
    last = "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(error)).removesuffix(last)


Frame = tuple[str, int]  # file, line
OUT_OF_MEMORY = " (the system does that when memory runs out)"
_DATA_WORKER_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: ([\w ]+)|exited unexpectedly)"
)
_MOST_LINES = 20
_TRACEBACK, _WORKERS = "Traceback (most recent call last)", "Original Traceback"
_MESHLOOM = f"{Path(__file__).parents[1]}{os.sep}"
_AUTOGRAD = f"{Path(torch.__file__).parent / 'autograd'}{os.sep}"
_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_OURS = (_MESHLOOM, f"{Path(torch.__file__).parent}{os.sep}", f"{sysconfig.get_path('scripts')}{os.sep}", "<")


def _is_ours(name: str) -> bool:
    return name.startswith(_OURS)


def _is_of_python(name: str) -> bool:
    """Whether a file is of the standard library."""
    return name.startswith(_LIBRARY) and not is_of_package(name)


def _is_installed(name: str) -> bool:
    return _is_ours(name) or name.startswith(_LIBRARY) or is_of_package(name)


def line_of(frame: Frame) -> str:
    """Like "file:number: text"."""
    name, number = frame
    return f"{_shown(name)}:{number}: {linecache.getline(name, number).strip()}".rstrip(": ")


def _shown(name: str) -> str:
    with suppress(ValueError, OSError):
        return str(Path(name).relative_to(Path.cwd()))
    return name
