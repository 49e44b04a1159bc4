"""What a user can be told: each error is one clear sentence with the numbers and the way out."""

from __future__ import annotations


class MeshloomError(Exception):
    """A failure that meshloom explains itself. `exit_code` is what the command line returns for it."""

    exit_code = 1


class PlanError(MeshloomError):
    """A plan that cannot be built, or does not fit the job or the devices."""

    exit_code = 2


class JobError(MeshloomError):
    """A job file or a `Job` that cannot be trained as it is written."""

    exit_code = 2


class CaptureError(MeshloomError):
    """A loss that cannot be read as a program: what it does depends on more than its tensors, or is not
    written in tensors."""

    exit_code = 2


class DeviceError(MeshloomError):
    """Devices that were asked for and are not there."""

    exit_code = 2


class MachineError(MeshloomError):
    """Measurements of a machine that are missing, broken, or do not cover what is asked."""

    exit_code = 2


class CheckpointError(MeshloomError):
    """A checkpoint that cannot be written, read, or does not belong to this job."""

    exit_code = 2


class ReportError(MeshloomError):
    """Something about a run that was not recorded, cannot be read, or cannot be drawn as asked."""

    exit_code = 2


class DataError(MeshloomError):
    """Data that ran dry, differs between ranks, or cannot be split as the plan needs."""


class TrainingError(MeshloomError):
    """A step that cannot go on: a loss that is not finite, a gradient that arrived twice, drifting
    replicas."""


class CollectiveError(MeshloomError):
    """Ranks that called different collectives, or the same one with different tensors."""


class EndpointError(MeshloomError):
    """An address that cannot be listened on or joined, or a key that is missing, open to others, or of
    another job."""

    exit_code = 2


class MessageError(MeshloomError):
    """A message between peers that is malformed, beyond what is expected, or not taken by its peer."""


ABORTED = "which has aborted"  # in a `PeerLostError` of a rank that another one has told: that one knows more


class PeerLostError(MeshloomError):
    """Another rank or peer went away; its own error is the cause."""
