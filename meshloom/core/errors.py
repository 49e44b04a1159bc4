"""The errors that users see: each is one clear sentence with the numbers and the way out."""

from __future__ import annotations


class MeshloomError(Exception):
    """A failure that meshloom explains. exit_code: of the command line."""

    exit_code = 1


# What Python, torch and meshloom raise in a job's code, where another error of its is none of ours to keep.
CODE_ERRORS = (
    MeshloomError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class PlanError(MeshloomError):
    """A plan that is invalid, or does not fit the job or the devices."""

    exit_code = 2


class JobError(MeshloomError):
    """A job file or a `Job` that cannot be trained as written."""

    exit_code = 2


class CaptureError(MeshloomError):
    """A loss that cannot be captured as a program: it depends on more than its tensors, or on none.

    path: the module at which it fails, where that is known. line: the user's line, where that is.
    """

    exit_code = 2
    path: str | None = None
    line: object = None

    def at(self, path: str | None, line: object = None) -> CaptureError:
        """The error, with the module or line at which the capture failed."""
        self.path, self.line = path, line
        return self


class DeviceError(MeshloomError):
    """Requested devices that are missing."""

    exit_code = 2


class MachineError(MeshloomError):
    """Measurements of a machine, or constants of a cluster, that are missing, invalid, or do not cover what is needed."""

    exit_code = 2


class CheckpointError(MeshloomError):
    """A checkpoint that cannot be written, read, or does not belong to this job."""

    exit_code = 2


class WeightsError(MeshloomError):
    """Files of weights that cannot be read, or do not fit the job's model."""

    exit_code = 2


class ReportError(MeshloomError):
    """A record of a run that is missing, cannot be read, or cannot be drawn."""

    exit_code = 2


class DataError(MeshloomError):
    """Data that is exhausted, differs between ranks, or cannot be split as the plan requires."""


class TrainingError(MeshloomError):
    """A step that cannot continue: a loss that is not finite, a gradient that arrives twice, a drift."""


class CollectiveError(MeshloomError):
    """Ranks that call different collectives, or the same one with different tensors."""


class EndpointError(MeshloomError):
    """An address that cannot be listened on or joined, or a key that is missing, open, or another job's."""

    exit_code = 2


class MessageError(MeshloomError):
    """A message between peers that is malformed, unexpected, or rejected by its peer."""


# in a `PeerLostError` because of another rank's abort: that rank knows the cause
ABORTED = "which has aborted"


class PeerLostError(MeshloomError):
    """Another rank or peer is lost; its own error is the cause."""


def first_line(error: BaseException) -> str:
    """Of its message; its class if it has none.

    >>> first_line(ValueError("no such thing\\nas a second line")), first_line(KeyError())
    ('no such thing', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
