"""Operations of a torch.distributed process group: started, waited for, and their errors put into words.

When a rank's process ends, its connections close and operations under way fail on all ranks. A rank that is
alive and calls `abort()` leaves a note in the group's store, which waiting ranks check once a second.

Gloo forgets an operation whose message it could not send any more because the connection had just closed: its wait
never ends. So ranks that wait also post a message now and then, which fails at once if the connection is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Work
from meshloom.comm.liveness.notes import Notes
from meshloom.core.errors import ABORTED, CollectiveError, PeerLostError, first_line

_POLL = timedelta(seconds=1)
# Gloo copies what it scatters or gathers until somebody has waited for it. With more bytes under way the
# oldest operations are waited for first.
_HELD_BYTES = 64 << 20
_NOBODY_SENDS = (1 << 31) - 1  # a tag

# Fragments of messages of Gloo, NCCL and the store, in lower case.
_TIMED_OUT = ("timed out", "timeout")
_ENDED = (
    "connection",
    "closed",
    "reset by peer",
    "broken pipe",
    "abort",
    "remote",
    "nccl",
    "socket",
    "store",
)
_UNEQUAL = ("op.preamble", "size mismatch", "must be same", "nbytes")


class C10dOperations:
    """Operations of one process group, as this rank starts them.

    members: name of each rank in errors.
    """

    def __init__(self, process_group: dist.ProcessGroup, members: Sequence[str]) -> None:
        self._members, self._member = members, members[process_group.rank()]
        self._notes = Notes(process_group.get_group_store)
        self._process_group = process_group
        self._aborted = False
        # under way, with what the backend or this rank holds for them in bytes
        self._holding: deque[tuple[Work, int]] = deque()

    def start(
        self,
        what: str,
        tensors: Sequence[Tensor],
        start: Callable[[], dist.Work | None],
        finish: Callable[[], None] | None = None,
        *,
        is_message: bool = False,
        copied_bytes: int = 0,
    ) -> Work:
        """Call `start` and return its work. Raises `PeerLostError`, `CollectiveError`.

        what: describes it in errors. tensors: kept alive until somebody has waited. finish: called after the
        wait. is_message: a wait cannot be interrupted to check the store. copied_bytes: of CPU tensors that
        the backend copies until the wait.
        """
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        copied_bytes = copied_bytes if on_cpu else 0
        self.make_room(copied_bytes)
        with self.explained(what):
            self._check_aborted(what)
            work = start()
        if work is None:
            raise CollectiveError(f"{self._member} takes no part in {what}.")
        started = _C10dWork(self, work, what, tensors, finish, on_cpu and not is_message)
        if copied_bytes:
            self.hold(started, copied_bytes)
        return started

    def wait_for(self, work: dist.Work, what: str, poll: bool) -> None:
        """Wait for a started operation. poll: check once a second whether a rank has aborted."""
        with self.explained(what):
            self._wait(work, what, poll)

    def abort(self) -> bool:
        """Start nothing more, and leave a note for the other ranks; False: that was done before."""
        if self._aborted:
            return False
        self._aborted = True
        self._notes.leave(self._member)
        return True

    def who_left(self) -> str | None:
        """The member that has aborted, if one has and its note can be read."""
        return self._notes.who_left()

    def who_is_gone(self, polls: int) -> str | None:
        """The member whose connection is closed, if one is, and not by a timeout of this rank's own: that closes all, and the
        operation that took too long says so. polls: as of `_closed`."""
        member, why = self._closed(polls) or (None, None)
        return member if why is None or not _is_timeout(why) else None

    def _closed(self, polls: int) -> tuple[str, RuntimeError] | None:
        """The member whose connection is closed, if one is, and what Gloo says of it. polls: seconds of a wait; it asks
        after 1, 2, 4, 8, ... of them, because every question stays with Gloo."""
        if polls & (polls - 1):
            return None
        for rank, member in enumerate(self._members):
            if rank != self._process_group.rank():
                try:
                    self._process_group.recv([torch.empty(1, dtype=torch.uint8)], rank, _NOBODY_SENDS)
                except RuntimeError as error:
                    return member, error
        return None

    def make_room(self, num_bytes: int) -> None:
        """Wait for the oldest operations if what is held for them would become too many bytes."""
        if not num_bytes:
            return
        self._holding = deque(each for each in self._holding if _holds(each[0]))
        while self._holding and sum(each for _, each in self._holding) + num_bytes > _HELD_BYTES:
            self._holding.popleft()[0].wait()

    def hold(self, work: Work, num_bytes: int) -> None:
        """So much is held for an operation until it is over."""
        self._holding.append((work, num_bytes))

    def _wait(self, work: dist.Work, what: str, poll: bool) -> None:
        for polls in count(1) if poll else ():
            self._check_aborted(what)
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or ended just after this wait gave up
                    work.wait()
                    return
                if left := self.who_left():
                    raise PeerLostError(f"{self._member} lost {left}, {ABORTED}, in {what}.") from None
                if closed := self._closed(polls):
                    gone, why = closed
                    if _is_timeout(why):
                        raise why from None
                    raise PeerLostError(f"{self._member} lost {gone} in {what}: connection closed.") from None
        self._check_aborted(what)
        work.wait()

    def _check_aborted(self, what: str) -> None:
        if self._aborted:
            raise PeerLostError(f"{self._member} has aborted its group: {what} cannot run.")

    @contextmanager
    def explained(self, what: str) -> Generator[None]:
        """Turns a backend's error into one that says which rank and operation it is about."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            here = self._member
            if any(fragment in text for fragment in _UNEQUAL):
                raise CollectiveError(
                    f"{what} on {here} met another operation or size on another rank: {_message_of(error)}"
                ) from error
            timed_out = _is_timeout(error)
            if not timed_out and not any(fragment in text for fragment in _ENDED):
                raise
            others = [member for member in self._members if member != here]
            peer = self.who_left() or (others[0] if len(others) == 1 else f"one of {', '.join(others)}")
            how = "waited too long for" if timed_out else "lost"
            raise PeerLostError(f"{here} {how} {peer} in {what}: {_message_of(error)}") from error


def _is_timeout(error: RuntimeError) -> bool:
    return any(fragment in str(error).lower() for fragment in _TIMED_OUT)


@dataclass(eq=False)
class _C10dWork(Work):
    operations: C10dOperations
    work: dist.Work | None  # with what the backend has copied; None once somebody has waited for it
    what: str
    tensors: Sequence[Tensor]  # kept alive while the backend uses their memory
    finish: Callable[[], None] | None
    poll: bool

    def wait(self) -> None:
        if self.work is None:
            return
        self.operations.wait_for(self.work, self.what, self.poll)
        if self.finish:
            self.finish()
        self.work = None
        self.tensors = ()

    def is_finished(self) -> bool:
        return self.work is None or self.work.is_completed()


def _holds(work: Work) -> bool:
    """Whether memory is held for it: Gloo keeps its copies until somebody has waited."""
    return work.work is not None if isinstance(work, _C10dWork) else not work.is_finished()


def _message_of(error: Exception) -> str:
    """The backend's message, without the position in its source and its advice."""
    line = first_line(error)
    if line.startswith("["):
        line = line.partition("] ")[2] or line
    return line.partition(". ")[0].rstrip(".") + "."
