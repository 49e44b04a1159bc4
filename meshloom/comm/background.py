"""Operations that run in a thread of their group, first in, first out, and the works that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from meshloom.comm.group import Work
from meshloom.core.errors import CollectiveError, PeerLostError

T = TypeVar("T")
_POLL_SECONDS = 1.0  # between two checks of a waiting rank for one that left


class Patience:
    """How a rank waits for its group's thread: it checks for ranks that left, and explains what failed.

    member: name of this rank in errors, like "rank 3 (dp=3)".
    who_left: the name of a rank that has aborted, or None; called once a second during a wait.
    who_is_gone: the name of a rank whose connection is closed, or None; given the number of such calls in a wait.
    aborted: whether this rank has aborted its group.
    """

    def __init__(
        self, member: str, who_left: Callable[[], str | None],
        who_is_gone: Callable[[int], str | None] = lambda polls: None,
    ) -> None:  # fmt: skip
        self.aborted = False
        self.who_left, self._who_is_gone = who_left, who_is_gone
        self.member = member

    def check(self, what: str) -> None:
        """Raise `PeerLostError` if this rank has aborted, so that nothing can be started."""
        if self.aborted:
            raise PeerLostError(f"{self.member} has aborted its group: {what} cannot run.")

    def wait_for(self, operation: Future[Any], what: str) -> None:
        """Wait for an operation, checking once a second for a rank that left."""
        self.check(what)
        polls = 0
        while not wait_for_futures([operation], _POLL_SECONDS).done:
            self.check(what)
            polls += 1
            if left := self.who_left():
                raise PeerLostError(f"{self.member} lost {left}, which has aborted, in {what}.")
            if gone := self._who_is_gone(polls):
                raise PeerLostError(f"{self.member} lost {gone} in {what}: connection closed.")
        if (error := operation.exception()) is not None:
            if self.aborted:
                raise PeerLostError(f"{self.member} has aborted its group: {what} cannot run.") from error
            if isinstance(error, PeerLostError | CollectiveError):
                raise type(error)(f"{error} This was a part of {what}.") from error
            raise error


class BackgroundWork(Work):
    """An operation that a thread runs. what: describes it in errors."""

    def __init__(self, patience: Patience, operation: Future[None], what: str) -> None:
        self._patience, self._operation, self._what = patience, operation, what
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._patience.wait_for(self._operation, self._what)
            self._done = True

    def is_finished(self) -> bool:
        return self._done or self._operation.done()


class Background:
    """A thread for operations of several messages. Whoever constructs it closes it.

    name: of the thread. patience: of the works that are returned.
    """

    def __init__(self, name: str, patience: Patience) -> None:
        self._thread = FifoThread(name)
        self._patience = patience
        self._failure: BaseException | None = None

    def start(self, what: str, run: Callable[[], None]) -> Work:
        """Start an operation, after the earlier ones. Once one has failed, all later ones fail likewise."""
        self._patience.check(what)
        return BackgroundWork(self._patience, self._thread.submit(lambda: self._run(run)), what)

    def abort(self) -> None:
        """Refuse to start anything; what is under way fails when the group underneath is aborted."""
        self._patience.aborted = True

    def close(self, seconds: float) -> bool:
        """End the thread once the started operations are over; whether that took at most `seconds`."""
        self._thread.end()
        return self._thread.ended_within(seconds)

    def _run(self, run: Callable[[], None]) -> None:
        if self._failure:  # ranks are out of step: some have sent what others never will receive
            raise self._failure
        try:
            with torch.no_grad():  # the mode is per thread
                run()
        except BaseException as error:
            self._failure = error
            raise


class FifoThread:
    """A thread that runs functions one after another. Whoever constructs it ends it.

    It is a daemon: an operation that other ranks never join does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """The result of `function`, which runs after those submitted before."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._queue.put(run)
        return future

    def end(self) -> None:
        """End the thread after what was submitted so far."""
        self._queue.put(None)

    def ended_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the thread to end; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (run := self._queue.get()) is not None:
            run()
            del run  # with the tensors that it holds
