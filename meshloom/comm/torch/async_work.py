"""The work object of torch.distributed for started operations: a wait, a query, or a future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshloom.comm.group import Work
from meshloom.comm.torch.host_copies import HostCopies
from meshloom.core.errors import MeshloomError

_DistWork: Any = dist.Work
_NO_LIMIT = timedelta(0)  # passed by C++ for a wait without a timeout of its own
_POLL_SECONDS = 0.0005
_CLOSE_SECONDS = 1.0


class TransportError(MeshloomError, dist.DistBackendError):
    """A failure between ranks; a RuntimeError too, as callers of torch.distributed expect."""


class ShmWork(_DistWork):
    """Operations that were started together, and what remains to be done once they have finished.

    what: describes them in errors. copies: copies the results back. result: the tensors that are filled.
    completer: waits for them when a future is requested. finish: called once they have finished.
    limit: how long `wait` may take; None: the group's own timeout.
    """

    in_order = True  # whether operations of its group finish in the order in which they start

    def __init__(
        self,
        what: str,
        parts: Sequence[Work],
        copies: HostCopies,
        result: Sequence[Tensor],
        completer: Completer,
        limit: timedelta | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._what, self._parts, self._copies, self._finish = what, parts, copies, finish
        self._completer = completer
        self._limit = limit
        self._result = list(result)
        self._lock = threading.Lock()  # a future is waited for in another thread
        self._settled = False
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the results may be read (on a GPU: by the current stream). Raises `TransportError`."""
        limit = timeout if timeout > _NO_LIMIT else self._limit
        self._settle(None if limit is None else time.monotonic() + limit.total_seconds(), limit)
        if self._error:
            raise self._error
        self._copies.follow()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._settled and all(part.is_finished() for part in self._parts):
            self._settle(None, None)  # does not wait
        return self._settled

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """A future of `result`. Another thread waits for an operation that has not finished."""
        if self._future is None:
            devices: Any = [self._copies.device] if self._copies.device else None
            self._future = Future(devices=devices)
            if self.is_completed():
                self.complete()
            else:
                self._completer.complete(self)
        return self._future

    def complete(self) -> None:
        """Wait, then complete the future."""
        future: Any = self._future
        try:
            self.wait()
        except Exception as error:  # raised to whoever waits for the future
            future.set_exception(error)
        else:
            self._copies.on_stream(lambda: future.set_result(self._result))

    def _settle(self, deadline: float | None, limit: timedelta | None) -> None:
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise self._too_long(limit)
        try:
            if self._settled:
                return
            while deadline is not None and not all(part.is_finished() for part in self._parts):
                if time.monotonic() >= deadline:
                    raise self._too_long(limit)
                time.sleep(_POLL_SECONDS)
            self._take()
        finally:
            self._lock.release()

    def _take(self) -> None:
        try:
            for part in self._parts:
                part.wait()
            if self._finish:
                self._finish()
            self._copies.bring_back()
        except MeshloomError as error:
            self._error = TransportError(str(error))
            self._error.__cause__ = error
        except RuntimeError as error:
            self._error = error
        self._settled = True
        self._finish = None

    def _too_long(self, limit: timedelta | None) -> TransportError:
        seconds = limit.total_seconds() if limit else 0.0
        return TransportError(
            f"{self._what} has reached its timeout of {seconds:g} s while other ranks had not started it."
        )


class ShmReceived(ShmWork):
    """A started receive."""

    in_order = False

    def source_rank(self) -> int:
        """The rank of the group that sent it."""
        self.wait()
        received: Any = self._parts[0]
        return received.source

    _source_rank = source_rank


class Completer:
    """Threads that complete futures: one for works that finish in their order, and one for each other work.

    They are started when needed, as daemons: an operation that a lost rank left unfinished does not keep this
    process alive.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[ShmWork | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._in_order = False
        self._closed = False

    def complete(self, work: ShmWork) -> None:
        if self._closed:
            work.complete()
        elif work.in_order:
            self._works.put(work)
            if not self._in_order:
                self._in_order = True
                self._begin(self._run)
        else:
            self._begin(work.complete)

    def close(self) -> bool:
        """Let the threads end after the works submitted so far; whether they have."""
        self._closed = True
        self._works.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _begin(self, act: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=act, name="meshloom futures", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.complete()
