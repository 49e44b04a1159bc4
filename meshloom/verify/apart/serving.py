"""The end of the process in which one device is: it answers rank 0 until that is gone."""

from __future__ import annotations

import gc
import pickle
import socket
from typing import Any

from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job
from meshloom.launch.failure import own_lines
from meshloom.machine.process_memory import trim
from meshloom.verify.apart.messages import ConnectionEndedError, receive, send
from meshloom.verify.comparison_run import ComparisonRun, compare_here
from meshloom.verify.fewer_blocks import with_fewer_blocks


def serve_reference(job: Job, descriptor: int, blocks: int | None = None) -> None:
    """Compares as rank 0 says. descriptor: of the socket to it. blocks: of `verify`."""
    if blocks is not None:
        job = with_fewer_blocks(job, blocks).job
    comparison: ComparisonRun | None = None
    with socket.socket(fileno=descriptor) as connection:
        while True:
            try:
                name, arguments = receive(connection)
                error: Exception | None = None
                found: Any = None
                try:
                    if name == "open":
                        if comparison is not None:  # lies in cycles, and the next one needs as much memory
                            comparison = None
                            gc.collect()
                        comparison = compare_here(job, *arguments)
                    else:
                        assert comparison is not None
                        found = getattr(comparison, name)(*arguments)
                        if not name.startswith("add_"):  # it has computed, and ranks compute next
                            trim()
                except Exception as raised:
                    error = to_send(raised)
                send(connection, (error, found))
            except ConnectionEndedError:
                return


def to_send(error: Exception) -> Exception:
    """An error that can be raised elsewhere, with the user's own lines."""
    if lines := own_lines(error):
        error.add_note(f"In the process of one device:\n{lines}")
    try:
        copy = pickle.loads(pickle.dumps(error))
    except (
        pickle.PickleError,
        TypeError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        ValueError,
    ):
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return MeshloomError(f"One device fails with {type(error).__name__}: {error}")
