"""A started operation as torch.distributed hands it out: to be waited for, asked, or turned into a future."""

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
from meshloom.comm.stand_ins import StandIns
from meshloom.errors import MeshloomError

_DistWork: Any = dist.Work
_NO_LIMIT = timedelta(0)  # how C++ says that a wait has none of its own
_GLANCE_SECONDS = 0.0005


class TransportError(MeshloomError, dist.DistBackendError):
    """What went wrong between the ranks; a RuntimeError too, as callers of torch.distributed expect."""


class ShmWork(_DistWork):
    """Operations that were started together, and what there is to do once they are over.

    what: for errors. near: brings the results back. result: the tensors that the operation fills.
    limit: how long `wait` may take; None: as long as the group's own timeout allows. completer: waits where nobody else does.
    """

    def __init__(
        self,
        what: str,
        parts: Sequence[Work],
        near: StandIns,
        result: Sequence[Tensor],
        completer: Completer,
        limit: timedelta | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._what, self._parts, self._near, self._completer, self._finish = what, parts, near, completer, finish
        self._limit = limit
        self._result = list(result)
        self._lock = threading.Lock()  # who waits for a future does it in another thread
        self._settled = False
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the results may be read (on a GPU: by the current stream). Raises `TransportError`."""
        limit = timeout if timeout > _NO_LIMIT else self._limit
        self._settle(None if limit is None else time.monotonic() + limit.total_seconds(), limit)
        if self._error:
            raise self._error
        self._near.follow()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._settled and all(part.is_finished() for part in self._parts):
            self._settle(None, None)  # at once
        return self._settled

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """A future of `result`. If the operation is under way, another thread waits for it."""
        if self._future is None:
            devices: Any = [self._near.device] if self._near.device else None
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
        except Exception as error:  # raised by whoever asks the future
            future.set_exception(error)
        else:
            self._near.on_stream(lambda: future.set_result(self._result))

    def _settle(self, deadline: float | None, limit: timedelta | None) -> None:
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise self._too_long(limit)
        try:
            if self._settled:
                return
            while deadline is not None and not all(part.is_finished() for part in self._parts):
                if time.monotonic() >= deadline:
                    raise self._too_long(limit)
                time.sleep(_GLANCE_SECONDS)
            self._take()
        finally:
            self._lock.release()

    def _take(self) -> None:
        try:
            for part in self._parts:
                part.wait()
            if self._finish:
                self._finish()
            self._near.bring_back()
        except MeshloomError as error:
            self._error = TransportError(str(error))
            self._error.__cause__ = error
        except RuntimeError as error:
            self._error = error
        self._settled = True
        self._finish = None

    def _too_long(self, limit: timedelta | None) -> TransportError:
        seconds = limit.total_seconds() if limit else 0.0
        return TransportError(f"{self._what} has reached its timeout of {seconds:g} s while other ranks had not started it.")


class ShmReceived(ShmWork):
    """A message under way."""

    def get_future(self) -> Future[list[Tensor]]:
        """A future of `result`. A thread of its own waits for each: messages come in any order."""
        if self._future is None and not self.is_completed():
            self._completer = Completer()
            future = super().get_future()
            self._completer.close()
            return future
        return super().get_future()

    def source_rank(self) -> int:
        """The rank of the group that sent it."""
        self.wait()
        received: Any = self._parts[0]
        return received.source

    def _source_rank(self) -> int:
        return self.source_rank()


class Completer:
    """A thread that waits for works in the order in which they were started; there is none until it is needed."""

    def __init__(self) -> None:
        self._works: SimpleQueue[ShmWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def complete(self, work: ShmWork) -> None:
        if self._closed:
            work.complete()
            return
        self._works.put(work)
        if self._thread is None:
            # A daemon: what a rank that is gone has left unfinished does not keep this process alive.
            self._thread = threading.Thread(target=self._run, name="meshloom futures", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """The thread ends after what it was given. Does not wait for it."""
        self._closed = True
        self._works.put(None)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.complete()
