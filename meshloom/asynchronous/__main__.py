"""A server or a worker: `python -m meshloom.asynchronous DIRECTORY`, with its role in the environment."""

from __future__ import annotations

import sys

from meshloom.asynchronous.start_role import play
from meshloom.launch.environment import launched_role, ranks_aside
from meshloom.launch.failure import leave, report_failure

if __name__ == "__main__":
    role = launched_role()
    if role is None:
        sys.exit(
            "This program is started by meshloom train. To be a worker of a run, use meshloom train FILE --join HOST:PORT --key KEY."
        )
    try:
        with ranks_aside():
            play(role)
    except BaseException as error:
        leave(report_failure(error))
