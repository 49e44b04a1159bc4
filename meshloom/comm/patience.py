"""How a rank waits for what a thread of its group does: it looks for a rank that left, and says what
failed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

from meshloom.comm.group import Work
from meshloom.comm.liveness.activity import Activity
from meshloom.core.errors import CollectiveError, PeerLostError

_GLANCE_SECONDS = 1.0  # after which a waiting rank looks for one that left


class Patience:
    """Of one rank of a group.

    member: what to call this rank in errors, like "rank 3 (dp=3)".
    activity: where it writes that it waits. After a wait that failed it still says so.
    who_left: what to call a rank that has aborted, if one has; a waiting rank asks once a second.
    aborted: whether this rank has aborted its group.
    """

    def __init__(self, member: str, activity: Activity | None, who_left: Callable[[], str | None]) -> None:
        self.aborted = False
        self.who_left = who_left
        self.member = member
        self._activity = activity or Activity()

    def check(self, what: str) -> None:
        """Raise `PeerLostError` if nothing can be started any more."""
        if self.aborted:
            raise PeerLostError(f"{self.member} has aborted its group: {what} cannot run.")

    def wait_for(self, operation: Future[Any], what: str) -> None:
        """Wait, looking once a second for a rank that left."""
        self._activity.waits()
        while not wait_for_futures([operation], _GLANCE_SECONDS).done:
            if left := self.who_left():
                raise PeerLostError(f"{self.member} lost {left}, which has aborted, in {what}.")
        if (error := operation.exception()) is not None:
            if self.aborted:
                raise PeerLostError(f"{self.member} has aborted its group: {what} cannot run.") from error
            if isinstance(error, PeerLostError | CollectiveError):
                raise type(error)(f"{error} This was a part of {what}.") from error
            raise error
        self._activity.goes_on()


class BackgroundWork(Work):
    """Something that a thread does."""

    def __init__(self, patience: Patience, operation: Future[None], what: str) -> None:
        self._patience, self._operation, self._what = patience, operation, what
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._patience.wait_for(self._operation, self._what)
            self._done = True

    def is_finished(self) -> bool:
        return self._done or self._operation.done()
