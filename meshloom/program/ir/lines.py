"""Locates the user's line behind an event in torch: the innermost frame of the user's code."""

from __future__ import annotations

import inspect
import linecache
from types import FrameType, TracebackType
from typing import NamedTuple

from meshloom.core.modules.packages import is_of_package, is_underneath

WAY_OUT = "Plans with dp and zero alone run the module as it is and need no program."  # ends every refusal
WAYS_OUT = f"Or move it into a function marked with @ml.leaf, or name its module in Job(leaves=[...]). {WAY_OUT}"  # of a line of code
_MOST_LETTERS = 120  # of a line's code in a sentence


class SourceLine(NamedTuple):
    """A line of source code."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """Its code."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class SourcePlace(NamedTuple):
    """Where something happened: the user's line, and the line of an installed package reached from it."""

    line: SourceLine | None
    inside: SourceLine | None

    def __str__(self) -> str:
        inside = f", inside {describe_line(self.inside)}" if self.inside and self.inside != self.line else ""
        return f"{describe_line(self.line)}{inside}"


def describe_line(line: SourceLine | None) -> str:
    """`file:12 (code)` for an error."""
    if line is None:
        return "a line that could not be found"
    text = line.text if len(line.text) <= _MOST_LETTERS else f"{line.text[:_MOST_LETTERS]} ..."
    return f"{line} ({text})" if text else str(line)


def line_of_frame(frame: FrameType | None) -> SourceLine | None:
    """The innermost frame outside of torch, meshloom, the standard library and installed packages; failing
    that, the innermost of an installed package."""
    return _place_of_frame(frame).line


def line_of_error(trace: TracebackType | None) -> SourceLine | None:
    """The same for the origin of an exception."""
    return place_of_error(trace).line


def place_of_error(trace: TracebackType | None) -> SourcePlace:
    """The origin of an exception."""
    users = packages = None
    while trace:
        file = trace.tb_frame.f_code.co_filename
        if not is_underneath(file):
            here = _line(trace.tb_frame, trace.tb_lineno)
            if is_of_package(file):
                packages = here
            else:
                users, packages = here, None
        trace = trace.tb_next
    return SourcePlace(users or packages, packages)


def place_here(depth: int = 1) -> SourcePlace:
    """Where the running code is, `depth` frames up."""
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = frame.f_back if frame else None
    return _place_of_frame(frame)


def _place_of_frame(frame: FrameType | None) -> SourcePlace:
    in_package = None
    while frame:
        file = frame.f_code.co_filename
        if not is_underneath(file):
            if not is_of_package(file):
                return SourcePlace(_line(frame, frame.f_lineno), in_package)
            in_package = in_package or _line(frame, frame.f_lineno)
        frame = frame.f_back
    return SourcePlace(in_package, in_package)


def _line(frame: FrameType, number: int) -> SourceLine:
    return SourceLine(frame.f_code.co_filename, number, frame.f_code.co_name)
