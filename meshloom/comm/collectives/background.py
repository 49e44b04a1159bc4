"""A thread in which operations of several messages go on, first in, first out, while the rank computes."""

from __future__ import annotations

import torch

from meshloom.comm.carrying import Waits
from meshloom.comm.fifo_thread import FifoThread
from meshloom.comm.group import Work
from meshloom.comm.patience import BackgroundWork, Patience


class Background:
    """Whoever makes it closes it.

    name: of the thread. patience: of those who wait for what it does.
    """

    def __init__(self, name: str, patience: Patience) -> None:
        self._thread = FifoThread(name)
        self._patience = patience
        self._failure: BaseException | None = None

    def start(self, what: str, steps: Waits) -> Work:
        """Begin an operation, when those before it are over. After one has failed, all later ones fail with
        its error."""
        self._patience.check(what)
        return BackgroundWork(self._patience, self._thread.submit(lambda: self._run(steps)), what)

    def abort(self) -> None:
        """What is started fails from now on; what is under way, when the group underneath is aborted."""
        self._patience.aborted = True

    def close(self, seconds: float) -> bool:
        """End the thread once what was started is over; whether that was so within `seconds`."""
        self._thread.end()
        return self._thread.ended_within(seconds)

    def _run(self, steps: Waits) -> None:
        if self._failure:  # ranks are out of step: some have sent what others never will receive
            raise self._failure
        try:
            with torch.no_grad():  # which holds for a thread, not for a process
                for work in steps:
                    work.wait()
        except BaseException as error:
            self._failure = error
            raise
