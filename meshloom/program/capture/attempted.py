"""An attempt to run a job's code, whose errors are results: other ranks wait for them, or another way follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshloom.core.errors import CaptureError, MeshloomError, first_line
from meshloom.program.ir.lines import describe_line, line_of_error

T = TypeVar("T")


class CodeFailedError(CaptureError):
    """The job's own code raised an error, which is the cause of this one."""


def attempted(make: Callable[[], T]) -> tuple[T | None, MeshloomError | None]:
    """The result of `make`, or its error; one of the job's code as a `CodeFailedError` with the user's line."""
    try:
        return make(), None
    except MeshloomError as error:
        return None, error
    except Exception as error:
        first = first_line(error)
        refused = CodeFailedError(
            f"Capturing the loss failed at {describe_line(line_of_error(error.__traceback__))}: {type(error).__name__}: {first}"
        )
        refused.__cause__ = error
        return None, refused
