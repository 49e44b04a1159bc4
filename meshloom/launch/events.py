"""A rank's reports to its launcher: one JSON line per event, on a pipe."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping

from meshloom.launch.environment import report_descriptor

STACK_SIGNAL = signal.SIGUSR2  # by which a launcher asks a rank that hangs for its stack


def send_event(event: Mapping[str, object]) -> bool:
    """Send a line to our launcher; False if there is none. If it has ended, this process ends too."""
    descriptor = report_descriptor()
    if descriptor is None:
        return False
    text = json.dumps(event).encode() + b"\n"
    try:
        while text:
            text = text[os.write(descriptor, text) :]
    except BrokenPipeError:
        os.killpg(0, signal.SIGKILL)
    except OSError:  # a program started by a rank inherits the variable, but not the pipe
        return False
    return True
